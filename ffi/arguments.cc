#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;

// Copies of 16 bytes are the smallest that tensor maps and vector loads are made for.
constexpr int64_t kHeadDimMultiple = 8;
constexpr int64_t kMaxHeadDim = 128;
constexpr uintptr_t kAlignment = 16;

std::optional<ElementType> Convert(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return ElementType::kBF16;
    case ffi::DataType::F16:
      return ElementType::kF16;
    case ffi::DataType::F32:
      return ElementType::kF32;
    case ffi::DataType::S32:
      return ElementType::kS32;
    default:
      return std::nullopt;
  }
}

std::string ShapeText(ffi::Span<const int64_t> dimensions) {
  std::string text = "[";
  for (int64_t size : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

Status Error(Operand operand, const std::string& what) {
  return Status::Error("operand " + std::string(Describe(operand).name) + " " + what);
}

Status CheckRank(Operand operand, const BufferView& buffer) {
  int rank = Describe(operand).rank;
  if (static_cast<int>(buffer.dimensions.size()) == rank) return Status();
  return Error(operand, "has shape " + ShapeText(buffer.dimensions) + ", expected rank " +
                            std::to_string(rank));
}

}  // namespace

Status Arguments::AddQueryKeyValue(BufferView query, BufferView key, BufferView value) {
  FA4_JAX_RETURN_IF_ERROR(CheckRank(Operand::kQuery, query));
  FA4_JAX_RETURN_IF_ERROR(CheckRank(Operand::kKey, key));
  FA4_JAX_RETURN_IF_ERROR(CheckRank(Operand::kValue, value));

  std::optional<ElementType> type = Convert(query.element_type);
  if (type != ElementType::kBF16 && type != ElementType::kF16) {
    return Error(Operand::kQuery, "is neither bf16 nor f16");
  }
  dtype_ = *type;

  const int64_t B = query.dimensions[0], T = query.dimensions[1], S = key.dimensions[1];
  const int64_t N = query.dimensions[2], K = key.dimensions[2];
  const int64_t H = query.dimensions[3], Hv = value.dimensions[3];
  for (auto [symbol, size] :
       {std::pair(Symbol::kB, B), {Symbol::kT, T}, {Symbol::kS, S}, {Symbol::kN, N},
        {Symbol::kK, K}, {Symbol::kH, H}, {Symbol::kHv, Hv}}) {
    if (size < 1) {
      return Status::Error("the dimension " + std::string(Name(symbol)) +
                           " is 0: empty attention is not a custom call");
    }
  }
  for (auto [symbol, size] : {std::pair(Symbol::kH, H), {Symbol::kHv, Hv}}) {
    if (size % kHeadDimMultiple != 0 || size > kMaxHeadDim) {
      return Status::Error("the head dim " + std::string(Name(symbol)) + " = " +
                           std::to_string(size) + " is not a multiple of " +
                           std::to_string(kHeadDimMultiple) + " up to " +
                           std::to_string(kMaxHeadDim));
    }
  }
  if (N % K != 0) {
    return Status::Error(std::to_string(N) + " query heads are not a multiple of " +
                         std::to_string(K) + " kv heads");
  }
  call_.SetSizes(B, T, S, N, K, H, Hv);
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kQuery, query));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kKey, key));
  return AddOperand(Operand::kValue, value);
}

Status Arguments::AddProblem(Symbol rows, BufferView scale, BufferView query_seq_lengths,
                             BufferView key_value_seq_lengths, BufferView query_offset,
                             BufferView query_segment_ids, BufferView key_value_segment_ids,
                             BufferView segment_bounds) {
  call_[Symbol::kRowBlocks] = (call_[rows] + kSegmentRows - 1) / kSegmentRows;
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kScale, scale));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kQuerySeqLengths, query_seq_lengths));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kKeyValueSeqLengths, key_value_seq_lengths));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kQueryOffset, query_offset));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kQuerySegmentIds, query_segment_ids));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kKeyValueSegmentIds, key_value_segment_ids));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kSegmentBounds, segment_bounds));
  for (Operand other : {Operand::kKeyValueSegmentIds, Operand::kSegmentBounds}) {
    bool query_has = call_.has(Operand::kQuerySegmentIds);
    if (call_.has(other) != query_has) {
      return Error(query_has ? other : Operand::kQuerySegmentIds,
                   "is absent, but " +
                       std::string(Describe(query_has ? Operand::kQuerySegmentIds : other).name) +
                       " is not: segments are all of query_segment_ids, key_value_segment_ids and "
                       "segment_bounds, or none");
    }
  }
  return Status();
}

Status Arguments::SetAttributes(int32_t window_left, int32_t window_right, float logits_soft_cap) {
  if (!(logits_soft_cap >= 0) || std::isinf(logits_soft_cap)) {
    return Status::Error("logits_soft_cap = " + std::to_string(logits_soft_cap) +
                         " is neither 0 (none) nor a positive finite number");
  }
  call_[Symbol::kWindowLeft] = window_left;
  call_[Symbol::kWindowRight] = window_right;
  call_[F32Symbol::kLogitsSoftCap] = logits_soft_cap;
  return Status();
}

Status Arguments::Add(Operand operand, const BufferView& buffer, bool writable) {
  const OperandInfo& info = Describe(operand);
  ElementType expected_type = info.element_type.value_or(dtype_);
  if (Convert(buffer.element_type) != expected_type) {
    return Error(operand, "is not " + std::string(Name(expected_type)));
  }
  FA4_JAX_RETURN_IF_ERROR(CheckRank(operand, buffer));
  Array array;
  array.element_type = expected_type;
  array.writable = writable;
  if (info.optional && std::all_of(buffer.dimensions.begin(), buffer.dimensions.end(),
                                   [](int64_t size) { return size == 0; })) {
    call_[operand] = array;  // a null pointer
    return Status();
  }

  array.rank = info.rank;
  bool same = true;
  for (int i = 0; i < info.rank; ++i) {
    array.dimensions[i] = call_[info.dimensions[i]];
    same = same && array.dimensions[i] == buffer.dimensions[i];
  }
  if (!same) {
    std::string names;
    for (int i = 0; i < info.rank; ++i) names += (i ? ", " : "") + Name(info.dimensions[i]);
    return Error(operand, "has shape " + ShapeText(buffer.dimensions) + ", expected [" + names +
                              "] = " +
                              ShapeText({array.dimensions.data(),
                                         static_cast<size_t>(info.rank)}));
  }
  array.address = buffer.address;
  if (reinterpret_cast<uintptr_t>(array.address) % kAlignment != 0) {
    return Error(operand, "is not aligned to " + std::to_string(kAlignment) + " bytes");
  }
  call_[operand] = array;
  return Status();
}

}  // namespace fa4_jax
