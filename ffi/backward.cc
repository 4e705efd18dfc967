// fa4_jax.backward.v1: the gradients of fa4_jax.forward.v1.
//
//   operands    query, key, value as there; out [B,T,N,Hv] and lse f32 [B,T,N] of the forward
//               call; dout [B,T,N,Hv]; dlse f32 [B,T,N] or, when absent, [0]; scale, lengths and
//               query_offset as there
//   results     dq, dk, dv in the shapes and type of query, key, value
//   scratch     dq_accumulator f32 [B,N,Tp,Hp], lse_log2 and delta f32 [B,N,Tp], also results: T
//               rounded up to 128, H to 64
//   attributes  window_left, window_right s32; 2^30 = unlimited
//
// Three launches: preprocess (delta, lse_log2, a zeroed dq_accumulator), the gradients themselves,
// postprocess (dq_accumulator to dq).

#include <utility>

#include "arguments.h"
#include "runtime.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;
using PerBatch = ffi::Buffer<ffi::DataType::S32, 1>;
using Scale = ffi::Buffer<ffi::DataType::F32, 1>;
using Rows = ffi::Buffer<ffi::DataType::F32, 3>;
using Accumulator = ffi::Buffer<ffi::DataType::F32, 4>;

ffi::Error Backward(const Context& context, ffi::AnyBuffer query, ffi::AnyBuffer key,
                    ffi::AnyBuffer value, ffi::AnyBuffer out, Rows lse, ffi::AnyBuffer dout,
                    ffi::AnyBuffer dlse, Scale scale, PerBatch query_seq_lengths,
                    PerBatch key_value_seq_lengths, PerBatch query_offset,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::Result<Accumulator> dq_accumulator,
                    ffi::Result<Rows> lse_log2, ffi::Result<Rows> delta, int32_t window_left,
                    int32_t window_right) {
  Arguments arguments;
  auto collect = [&]() -> Status {
    FA4_JAX_RETURN_IF_ERROR(arguments.AddQueryKeyValue(query, key, value));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kOut, out));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kLse, lse));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kDout, dout));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kDlse, dlse));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kScale, scale));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kQuerySeqLengths, query_seq_lengths));
    FA4_JAX_RETURN_IF_ERROR(
        arguments.AddOperand(Operand::kKeyValueSeqLengths, key_value_seq_lengths));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kQueryOffset, query_offset));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDq, *dq));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDk, *dk));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDv, *dv));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDqAccumulator, *dq_accumulator));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kLseLog2, *lse_log2));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDelta, *delta));
    arguments.SetWindow(window_left, window_right);
    return Status();
  };
  Status checked = collect();
  return Run(context, checked, arguments,
             {Operation::kBackwardPreprocess, Operation::kBackward,
              Operation::kBackwardPostprocess});
}

// The part of a binding that all stages and platforms share; their contexts come before it.
template <typename Binding>
auto Bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // query
      .template Arg<ffi::AnyBuffer>()  // key
      .template Arg<ffi::AnyBuffer>()  // value
      .template Arg<ffi::AnyBuffer>()  // out
      .template Arg<Rows>()            // lse
      .template Arg<ffi::AnyBuffer>()  // dout
      .template Arg<ffi::AnyBuffer>()  // dlse: of rank 3, or 1 when absent
      .template Arg<Scale>()
      .template Arg<PerBatch>()        // query_seq_lengths
      .template Arg<PerBatch>()        // key_value_seq_lengths
      .template Arg<PerBatch>()        // query_offset
      .template Ret<ffi::AnyBuffer>()  // dq
      .template Ret<ffi::AnyBuffer>()  // dk
      .template Ret<ffi::AnyBuffer>()  // dv
      .template Ret<Accumulator>()
      .template Ret<Rows>()  // lse_log2
      .template Ret<Rows>()  // delta
      .template Attr<int32_t>("window_left")
      .template Attr<int32_t>("window_right");
}

}  // namespace
}  // namespace fa4_jax

FA4_JAX_DEFINE_HANDLERS(Backward, fa4_jax::Backward, fa4_jax::Bind);
