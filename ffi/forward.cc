// fa4_jax.forward.v1: exact attention of 16-bit arrays with float32 accumulation.
//
//   operands    query [B,T,N,H], key [B,S,K,H], value [B,S,K,Hv]: all bf16 or all f16
//               scale f32 [B]; query_seq_lengths, key_value_seq_lengths, query_offset s32 [B] or,
//               when absent, [0]
//   results     out [B,T,N,Hv] in query's type, lse f32 [B,T,N]
//   attributes  window_left, window_right s32; 2^30 = unlimited
//
// The two 16-bit types make query, key, value and out AnyBuffers; all else is declared.

#include <utility>

#include "arguments.h"
#include "runtime.h"

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;
using PerBatch = ffi::Buffer<ffi::DataType::S32, 1>;
using Scale = ffi::Buffer<ffi::DataType::F32, 1>;
using Lse = ffi::Buffer<ffi::DataType::F32, 3>;

ffi::Error Forward(const Context& context, ffi::AnyBuffer query, ffi::AnyBuffer key,
                   ffi::AnyBuffer value, Scale scale, PerBatch query_seq_lengths,
                   PerBatch key_value_seq_lengths, PerBatch query_offset,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<Lse> lse, int32_t window_left,
                   int32_t window_right) {
  Arguments arguments;
  auto collect = [&]() -> Status {
    FA4_JAX_RETURN_IF_ERROR(arguments.AddQueryKeyValue(query, key, value));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kScale, scale));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kQuerySeqLengths, query_seq_lengths));
    FA4_JAX_RETURN_IF_ERROR(
        arguments.AddOperand(Operand::kKeyValueSeqLengths, key_value_seq_lengths));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddOperand(Operand::kQueryOffset, query_offset));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kOut, *out));
    FA4_JAX_RETURN_IF_ERROR(arguments.AddResult(Operand::kLse, *lse));
    arguments.SetWindow(window_left, window_right);
    return Status();
  };
  Status checked = collect();
  return Run(context, checked, arguments, {Operation::kForward});
}

// The part of a binding that all stages and platforms share; their contexts come before it.
template <typename Binding>
auto Bind(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // query
      .template Arg<ffi::AnyBuffer>()  // key
      .template Arg<ffi::AnyBuffer>()  // value
      .template Arg<Scale>()
      .template Arg<PerBatch>()  // query_seq_lengths
      .template Arg<PerBatch>()  // key_value_seq_lengths
      .template Arg<PerBatch>()  // query_offset
      .template Ret<ffi::AnyBuffer>()
      .template Ret<Lse>()
      .template Attr<int32_t>("window_left")
      .template Attr<int32_t>("window_right");
}

}  // namespace
}  // namespace fa4_jax

FA4_JAX_DEFINE_HANDLERS(Forward, fa4_jax::Forward, fa4_jax::Bind);
