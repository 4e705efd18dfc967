// From XLA's buffers to a Call: what every handler does with its arguments before it uses a
// stride. What does not fit becomes INVALID_ARGUMENT with the operand's name.

#ifndef FA4_JAX_FFI_ARGUMENTS_H_
#define FA4_JAX_FFI_ARGUMENTS_H_

#include <cstdint>
#include <utility>

#include "operands.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

// The declared types of what Arguments::AddProblem takes.
using PerBatchF32 = xla::ffi::Buffer<xla::ffi::DataType::F32, 1>;
using PerBatchS32 = xla::ffi::Buffer<xla::ffi::DataType::S32, 1>;
using SegmentIds = xla::ffi::Buffer<xla::ffi::DataType::S32, 2>;
using SegmentBounds = xla::ffi::Buffer<xla::ffi::DataType::S32, 3>;

// Binds them, in that order.
template <typename Binding>
auto BindProblem(Binding binding) {
  return std::move(binding)
      .template Arg<PerBatchF32>()  // scale
      .template Arg<PerBatchS32>()  // query_seq_lengths
      .template Arg<PerBatchS32>()  // key_value_seq_lengths
      .template Arg<PerBatchS32>()  // query_offset
      .template Arg<SegmentIds>()   // query_segment_ids
      .template Arg<SegmentIds>()   // key_value_segment_ids
      .template Arg<SegmentBounds>();
}

// Binds what Arguments::SetAttributes takes.
template <typename Binding>
auto BindAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<int32_t>("window_left")
      .template Attr<int32_t>("window_right")
      .template Attr<float>("logits_soft_cap");
}

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

  // Adds what every handler is told of the problem, in the order of its operands. Fails also when
  // one array of segments is there without the others. `rows` are those of segment_bounds: T in the
  // forward, S in the backward.
  Status AddProblem(Symbol rows, BufferView scale, BufferView query_seq_lengths,
                    BufferView key_value_seq_lengths, BufferView query_offset,
                    BufferView query_segment_ids, BufferView key_value_segment_ids,
                    BufferView segment_bounds);

  // Fails unless the cap is 0 (none) or positive and finite.
  Status SetAttributes(int32_t window_left, int32_t window_right, float logits_soft_cap);

  Call& call() { return call_; }

 private:
  Status Add(Operand operand, const BufferView& buffer, bool writable);

  Call call_;
  ElementType dtype_ = ElementType::kBF16;
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_ARGUMENTS_H_
