#include "operands.h"

namespace fa4_jax {
namespace {

// Scratch results are padded to these; fa4_jax/custom_calls.py makes their shapes.
constexpr int64_t kQueryTile = 128;
constexpr int64_t kHeadTile = 64;

// Query heads are packed into a tile of so many rows: kernels/abi.py, PACKED_ROWS.
constexpr int64_t kPackedRows = 128;

int64_t RoundUp(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

using S = Symbol;
constexpr auto kF32 = ElementType::kF32;
constexpr auto kS32 = ElementType::kS32;

// In the order of Operand.
constexpr std::array<OperandInfo, kNumOperands> kOperands = {{
    {"query", 4, {S::kB, S::kT, S::kN, S::kH}, {}, false},
    {"key", 4, {S::kB, S::kS, S::kK, S::kH}, {}, false},
    {"value", 4, {S::kB, S::kS, S::kK, S::kHv}, {}, false},
    {"scale", 1, {S::kB}, kF32, false},
    {"query_seq_lengths", 1, {S::kB}, kS32, true},
    {"key_value_seq_lengths", 1, {S::kB}, kS32, true},
    {"query_offset", 1, {S::kB}, kS32, true},
    {"query_segment_ids", 2, {S::kB, S::kT}, kS32, true},
    {"key_value_segment_ids", 2, {S::kB, S::kS}, kS32, true},
    {"segment_bounds", 3, {S::kB, S::kRowBlocks, kNumbersOfBounds}, kS32, true},
    {"sinks", 2, {S::kB, S::kN}, kF32, true},
    {"out", 4, {S::kB, S::kT, S::kN, S::kHv}, {}, false},
    {"lse", 3, {S::kB, S::kT, S::kN}, kF32, false},
    {"dout", 4, {S::kB, S::kT, S::kN, S::kHv}, {}, false},
    {"dlse", 3, {S::kB, S::kT, S::kN}, kF32, true},
    {"dq", 4, {S::kB, S::kT, S::kN, S::kH}, {}, false},
    {"dk", 4, {S::kB, S::kS, S::kK, S::kH}, {}, false},
    {"dv", 4, {S::kB, S::kS, S::kK, S::kHv}, {}, false},
    {"dq_accumulator", 4, {S::kB, S::kN, S::kTp, S::kHp}, kF32, false},
    {"lse_log2", 3, {S::kB, S::kN, S::kTp}, kF32, false},
    {"delta", 3, {S::kB, S::kN, S::kTp}, kF32, false},
}};

// In the order of Symbol, F32Symbol, Operation, ElementType.
constexpr std::array<std::string_view, kNumSymbols> kSymbols = {
    "B",  "T",  "S",    "N",        "K",        "H",          "Hv",
    "Tp", "Hp", "pack", "packed_T", "packed_N", "row_blocks", "window_left",
    "window_right", "num_sms"};
constexpr std::array<std::string_view, kNumF32Symbols> kF32Symbols = {"logits_soft_cap"};
constexpr std::array<std::string_view, 4> kOperations = {"forward", "backward_preprocess",
                                                         "backward", "backward_postprocess"};
constexpr std::array<std::string_view, 4> kElementTypes = {"bf16", "f16", "f32", "s32"};

template <typename Enum, size_t n>
std::optional<Enum> Find(const std::array<std::string_view, n>& names, std::string_view name) {
  for (size_t i = 0; i < n; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

}  // namespace

const OperandInfo& Describe(Operand operand) { return kOperands[static_cast<size_t>(operand)]; }
std::string_view Name(Symbol symbol) { return kSymbols[static_cast<size_t>(symbol)]; }
std::string_view Name(F32Symbol symbol) { return kF32Symbols[static_cast<size_t>(symbol)]; }
std::string_view Name(Operation operation) { return kOperations[static_cast<size_t>(operation)]; }
std::string_view Name(ElementType type) { return kElementTypes[static_cast<size_t>(type)]; }

std::string Name(const Extent& extent) {
  return extent.symbol ? std::string(Name(*extent.symbol)) : std::to_string(extent.constant);
}

size_t Bytes(ElementType type) {
  return type == ElementType::kBF16 || type == ElementType::kF16 ? 2 : 4;
}

std::optional<Operand> FindOperand(std::string_view name) {
  for (size_t i = 0; i < kNumOperands; ++i) {
    if (kOperands[i].name == name) return static_cast<Operand>(i);
  }
  return std::nullopt;
}
std::optional<Symbol> FindSymbol(std::string_view name) { return Find<Symbol>(kSymbols, name); }
std::optional<F32Symbol> FindF32Symbol(std::string_view name) {
  return Find<F32Symbol>(kF32Symbols, name);
}
std::optional<Operation> FindOperation(std::string_view name) {
  return Find<Operation>(kOperations, name);
}

void Call::SetSizes(int64_t B, int64_t T, int64_t S, int64_t N, int64_t K, int64_t H, int64_t Hv) {
  Call& call = *this;
  call[Symbol::kB] = B;
  call[Symbol::kT] = T;
  call[Symbol::kS] = S;
  call[Symbol::kN] = N;
  call[Symbol::kK] = K;
  call[Symbol::kH] = H;
  call[Symbol::kHv] = Hv;
  call[Symbol::kTp] = RoundUp(T, kQueryTile);
  call[Symbol::kHp] = RoundUp(H, kHeadTile);
  // The heads of one kv head, as many as a power of two divides and a tile holds at all positions.
  int64_t pack = 1;
  while (N / K % (2 * pack) == 0 && 2 * pack * T <= kPackedRows) pack *= 2;
  call[Symbol::kPack] = pack;
  call[Symbol::kPackedT] = T * pack;
  call[Symbol::kPackedN] = N / pack;
}

}  // namespace fa4_jax
