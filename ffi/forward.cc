// fa4_jax.forward.v1: exact attention of 16-bit arrays with float32 accumulation.
//
//   operands    query [B,T,N,H], key [B,S,K,H], value [B,S,K,Hv]: all bf16 or all f16
//               scale f32 [B]
//               optional: query_seq_lengths, key_value_seq_lengths, query_offset s32 [B];
//               query_segment_ids s32 [B,T], key_value_segment_ids s32 [B,S] and segment_bounds
//               s32 [B,ceil(T/64),4] (its meaning: kernels/abi.py), all three or none;
//               sinks f32 [B,N], an extra logit of each head, neither scaled nor capped
//   results     out [B,T,N,Hv] in query's type, lse f32 [B,T,N]
//   attributes  window_left, window_right s32, 2^30 = unlimited; logits_soft_cap f32, 0 = none
//
// An absent optional operand has its rank and a shape of zeros. The two 16-bit types make query,
// key, value and out AnyBuffers; all else is declared.

#include <utility>

#include "arguments.h"
#include "runtime.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;
using Lse = ffi::Buffer<ffi::DataType::F32, 3>;
using Sinks = ffi::Buffer<ffi::DataType::F32, 2>;

ffi::Error Forward(const Context& context, ffi::AnyBuffer query, ffi::AnyBuffer key,
                   ffi::AnyBuffer value, PerBatchF32 scale, PerBatchS32 query_seq_lengths,
                   PerBatchS32 key_value_seq_lengths, PerBatchS32 query_offset,
                   SegmentIds query_segment_ids, SegmentIds key_value_segment_ids,
                   SegmentBounds segment_bounds, Sinks sinks, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<Lse> lse, int32_t window_left, int32_t window_right,
                   float logits_soft_cap) {
  Arguments arguments;
  auto collect = [&]() -> Status {
    FA4_JAX_RETURN_IF_ERROR(arguments.AddQueryKeyValue(query, key, value));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddProblem(
        Symbol::kT, scale, query_seq_lengths, key_value_seq_lengths, query_offset,
        query_segment_ids, key_value_segment_ids, segment_bounds));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kSinks, sinks));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kOut, *out));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kLse, *lse));
    return arguments.SetAttributes(window_left, window_right, logits_soft_cap);
  };
  Status checked = collect();
  return Run(context, checked, arguments, {Operation::kForward});
}

// The part of a binding that all stages and platforms share; their contexts come before it.
template <typename Binding>
auto Bind(Binding binding) {
  return BindAttributes(BindProblem(std::move(binding)
                                        .template Arg<ffi::AnyBuffer>()   // query
                                        .template Arg<ffi::AnyBuffer>()   // key
                                        .template Arg<ffi::AnyBuffer>())  // value
                            .template Arg<Sinks>()
                            .template Ret<ffi::AnyBuffer>()  // out
                            .template Ret<Lse>());
}

}  // namespace
}  // namespace fa4_jax

FA4_JAX_DEFINE_HANDLERS(Forward, fa4_jax::Forward, fa4_jax::Bind);
