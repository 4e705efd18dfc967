#include "arguments.h"

#include <algorithm>
#include <optional>

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;

// Scratch results are padded to these; fa4_jax/custom_calls.py makes their shapes.
constexpr int64_t kQueryTile = 128;
constexpr int64_t kHeadTile = 64;

// Copies of 16 bytes are the smallest that tensor maps and vector loads are made for.
constexpr int64_t kHeadDimMultiple = 8;
constexpr int64_t kMaxHeadDim = 128;
constexpr uintptr_t kAlignment = 16;

int64_t RoundUp(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

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

  call_[Symbol::kB] = query.dimensions[0];
  call_[Symbol::kT] = query.dimensions[1];
  call_[Symbol::kN] = query.dimensions[2];
  call_[Symbol::kH] = query.dimensions[3];
  call_[Symbol::kS] = key.dimensions[1];
  call_[Symbol::kK] = key.dimensions[2];
  call_[Symbol::kHv] = value.dimensions[3];
  call_[Symbol::kTp] = RoundUp(call_[Symbol::kT], kQueryTile);
  call_[Symbol::kHp] = RoundUp(call_[Symbol::kH], kHeadTile);
  for (Symbol symbol : {Symbol::kB, Symbol::kT, Symbol::kS, Symbol::kN, Symbol::kK, Symbol::kH,
                        Symbol::kHv}) {
    if (call_[symbol] < 1) {
      return Status::Error("the dimension " + std::string(Name(symbol)) +
                           " is 0: empty attention is not a custom call");
    }
  }
  for (Symbol symbol : {Symbol::kH, Symbol::kHv}) {
    if (call_[symbol] % kHeadDimMultiple != 0 || call_[symbol] > kMaxHeadDim) {
      return Status::Error("the head dim " + std::string(Name(symbol)) + " = " +
                           std::to_string(call_[symbol]) + " is not a multiple of " +
                           std::to_string(kHeadDimMultiple) + " up to " +
                           std::to_string(kMaxHeadDim));
    }
  }
  if (call_[Symbol::kN] % call_[Symbol::kK] != 0) {
    return Status::Error(std::to_string(call_[Symbol::kN]) +
                         " query heads are not a multiple of " +
                         std::to_string(call_[Symbol::kK]) + " kv heads");
  }
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kQuery, query));
  FA4_JAX_RETURN_IF_ERROR(AddOperand(Operand::kKey, key));
  return AddOperand(Operand::kValue, value);
}

void Arguments::SetWindow(int32_t left, int32_t right) {
  call_[Symbol::kWindowLeft] = left;
  call_[Symbol::kWindowRight] = right;
}

int64_t Arguments::head_dim() const { return std::max(call_[Symbol::kH], call_[Symbol::kHv]); }

Status Arguments::Add(Operand operand, BufferView buffer, bool writable) {
  const OperandInfo& info = Describe(operand);
  ElementType expected_type = info.element_type.value_or(dtype_);
  if (Convert(buffer.element_type) != expected_type) {
    return Error(operand, "is not " + std::string(Name(expected_type)));
  }
  Array array;
  array.element_type = expected_type;
  array.writable = writable;
  if (info.optional && buffer.dimensions.size() == 1 && buffer.dimensions[0] == 0) {
    call_[operand] = array;  // a null pointer
    return Status();
  }

  FA4_JAX_RETURN_IF_ERROR(CheckRank(operand, buffer));
  array.rank = info.rank;
  std::string names;
  bool same = true;
  for (int i = 0; i < info.rank; ++i) {
    array.dimensions[i] = call_[info.dimensions[i]];
    same = same && array.dimensions[i] == buffer.dimensions[i];
  }
  if (!same) {
    for (int i = 0; i < info.rank; ++i) {
      names += (i ? ", " : "") + std::string(Name(info.dimensions[i]));
    }
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
