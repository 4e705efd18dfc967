// fa4_jax.backward.v1: the gradients of fa4_jax.forward.v1, except those of scale and sinks.
//
//   operands    query, key, value as there; out [B,T,N,Hv] and lse f32 [B,T,N] of the forward
//               call; dout [B,T,N,Hv]; optional: dlse f32 [B,T,N]; then as there: scale, lengths,
//               query_offset and segments, but segment_bounds is s32 [B,ceil(S/64),4]: its rows
//               are keys. The sinks are in lse.
//   results     dq, dk, dv in the shapes and type of query, key, value
//   scratch     dq_accumulator f32 [B,N,Tp,Hp], lse_log2 and delta f32 [B,N,Tp], also results: T
//               rounded up to 128, H to 64
//   attributes  as there
//
// Three launches: preprocess (delta, lse_log2, a zeroed dq_accumulator), the gradients themselves,
// postprocess (dq_accumulator to dq).

#include <utility>

#include "arguments.h"
#include "runtime.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;
using Rows = ffi::Buffer<ffi::DataType::F32, 3>;
using Accumulator = ffi::Buffer<ffi::DataType::F32, 4>;

ffi::Error Backward(const Context& context, ffi::AnyBuffer query, ffi::AnyBuffer key,
                    ffi::AnyBuffer value, ffi::AnyBuffer out, Rows lse, ffi::AnyBuffer dout,
                    Rows dlse, PerBatchF32 scale, PerBatchS32 query_seq_lengths,
                    PerBatchS32 key_value_seq_lengths, PerBatchS32 query_offset,
                    SegmentIds query_segment_ids, SegmentIds key_value_segment_ids,
                    SegmentBounds segment_bounds, ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
                    ffi::Result<Accumulator> dq_accumulator, ffi::Result<Rows> lse_log2,
                    ffi::Result<Rows> delta, int32_t window_left, int32_t window_right,
                    float logits_soft_cap) {
  Arguments arguments;
  auto collect = [&]() -> Status {
    FA4_JAX_RETURN_IF_ERROR(arguments.AddQueryKeyValue(query, key, value));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kOut, out));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kLse, lse));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kDout, dout));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kDlse, dlse));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddProblem(
        Symbol::kS, scale, query_seq_lengths, key_value_seq_lengths, query_offset,
        query_segment_ids, key_value_segment_ids, segment_bounds));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDq, *dq));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDk, *dk));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDv, *dv));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDqAccumulator, *dq_accumulator));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kLseLog2, *lse_log2));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kDelta, *delta));
    return arguments.SetAttributes(window_left, window_right, logits_soft_cap);
  };
  Status checked = collect();
  return Run(context, checked, arguments,
             {Operation::kBackwardPreprocess, Operation::kBackward,
              Operation::kBackwardPostprocess});
}

// The part of a binding that all stages and platforms share; their contexts come before it.
template <typename Binding>
auto Bind(Binding binding) {
  return BindAttributes(BindProblem(std::move(binding)
                                        .template Arg<ffi::AnyBuffer>()  // query
                                        .template Arg<ffi::AnyBuffer>()  // key
                                        .template Arg<ffi::AnyBuffer>()  // value
                                        .template Arg<ffi::AnyBuffer>()  // out
                                        .template Arg<Rows>()            // lse
                                        .template Arg<ffi::AnyBuffer>()  // dout
                                        .template Arg<Rows>())           // dlse
                            .template Ret<ffi::AnyBuffer>()              // dq
                            .template Ret<ffi::AnyBuffer>()              // dk
                            .template Ret<ffi::AnyBuffer>()              // dv
                            .template Ret<Accumulator>()
                            .template Ret<Rows>()    // lse_log2
                            .template Ret<Rows>());  // delta
}

}  // namespace
}  // namespace fa4_jax

FA4_JAX_DEFINE_HANDLERS(Backward, fa4_jax::Backward, fa4_jax::Bind);
