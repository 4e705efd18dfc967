// From XLA's buffers to a Call: what every handler does with its arguments before it uses a
// stride. What does not fit becomes INVALID_ARGUMENT with the operand's name.

#ifndef FA4_JAX_FFI_ARGUMENTS_H_
#define FA4_JAX_FFI_ARGUMENTS_H_

#include <string>

#include "operands.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

// A buffer of any declared type.
struct BufferView {
  template <typename Buffer>
  BufferView(const Buffer& buffer)  // NOLINT: implicit, so that calls list buffers plainly
      : element_type(buffer.element_type()),
        dimensions(buffer.dimensions()),
        address(buffer.untyped_data()) {}

  xla::ffi::DataType element_type;
  xla::ffi::Span<const int64_t> dimensions;
  void* address;
};

// Collects the arrays of a call, checking each against the operand table.
class Arguments {
 public:
  // Checks and adds the three arrays that all sizes of a call follow from. Fails when a rank is not
  // 4, a dimension is empty, a type is not 16-bit, or no kernel of any bundle takes the head dims.
  Status AddQueryKeyValue(BufferView query, BufferView key, BufferView value);

  Status AddOperand(Operand operand, BufferView buffer) { return Add(operand, buffer, false); }
  Status AddResult(Operand operand, BufferView buffer) { return Add(operand, buffer, true); }

  void SetWindow(int32_t left, int32_t right);

  Call& call() { return call_; }
  const Call& call() const { return call_; }
  ElementType dtype() const { return dtype_; }
  int64_t head_dim() const;  // max(H, Hv): what a kernel's tile has to hold

 private:
  Status Add(Operand operand, BufferView buffer, bool writable);

  Call call_;
  ElementType dtype_ = ElementType::kBF16;
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_ARGUMENTS_H_
