// The vocabulary that handlers and manifest share: the arrays of a call by name, and the numbers
// (dimensions and attributes) that kernels may ask for. kernels/abi.py holds the same tables for
// the build; the manifest parser rejects a name that is missing here.

#ifndef FA4_JAX_FFI_OPERANDS_H_
#define FA4_JAX_FFI_OPERANDS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "driver.h"

namespace fa4_jax {

enum class Operation { kForward, kBackwardPreprocess, kBackward, kBackwardPostprocess };

enum class Operand {
  kQuery,
  kKey,
  kValue,
  kScale,
  kQuerySeqLengths,
  kKeyValueSeqLengths,
  kQueryOffset,
  kQuerySegmentIds,
  kKeyValueSegmentIds,
  kSegmentBounds,
  kSinks,
  kOut,
  kLse,
  kDout,
  kDlse,
  kDq,
  kDk,
  kDv,
  kDqAccumulator,
  kLseLog2,
  kDelta,
};
constexpr size_t kNumOperands = static_cast<size_t>(Operand::kDelta) + 1;

enum class Symbol {
  kB,
  kT,
  kS,
  kN,
  kK,
  kH,
  kHv,
  kTp,
  kHp,
  kPack,
  kPackedT,
  kPackedN,
  kRowBlocks,
  kWindowLeft,
  kWindowRight,
  kNumSms,
};
constexpr size_t kNumSymbols = static_cast<size_t>(Symbol::kNumSms) + 1;

enum class F32Symbol { kLogitsSoftCap };
constexpr size_t kNumF32Symbols = static_cast<size_t>(F32Symbol::kLogitsSoftCap) + 1;

// segment_bounds has an entry for every block of so many rows, of so many numbers.
constexpr int64_t kSegmentRows = 64;
constexpr int64_t kNumbersOfBounds = 4;

constexpr int kMaxRank = 4;

// One dimension of an operand: the value of a symbol, or a number.
struct Extent {
  constexpr Extent() = default;
  // NOLINTNEXTLINE: implicit, so that tables list dimensions plainly
  constexpr Extent(Symbol symbol) : symbol(symbol) {}
  constexpr Extent(int64_t constant) : constant(constant) {}  // NOLINT: likewise

  std::optional<Symbol> symbol;
  int64_t constant = 0;
};

struct OperandInfo {
  std::string_view name;
  int rank;
  std::array<Extent, kMaxRank> dimensions;  // the first `rank`
  // Absent: the call's own 16-bit type.
  std::optional<ElementType> element_type;
  bool optional;  // may be absent, which a shape of zeros alone says
};

const OperandInfo& Describe(Operand operand);
std::string Name(const Extent& extent);
std::string_view Name(Symbol symbol);
std::string_view Name(F32Symbol symbol);
std::string_view Name(Operation operation);
std::string_view Name(ElementType type);  // "bf16", "f16", "f32", "s32"
size_t Bytes(ElementType type);

std::optional<Operand> FindOperand(std::string_view name);
std::optional<Symbol> FindSymbol(std::string_view name);
std::optional<F32Symbol> FindF32Symbol(std::string_view name);
std::optional<Operation> FindOperation(std::string_view name);

// One array of a call; `address` is null when an optional array is absent.
struct Array {
  ElementType element_type = ElementType::kBF16;
  void* address = nullptr;
  int rank = 0;
  std::array<int64_t, kMaxRank> dimensions = {};
  bool writable = false;

  size_t bytes() const {
    if (address == nullptr) return 0;
    size_t bytes = Bytes(element_type);
    for (int i = 0; i < rank; ++i) bytes *= static_cast<size_t>(dimensions[i]);
    return bytes;
  }
};

// All that a launch can be told about: what the handlers fill and the launcher reads.
struct Call {
  std::array<std::optional<Array>, kNumOperands> arrays;
  std::array<int64_t, kNumSymbols> symbols = {};
  std::array<float, kNumF32Symbols> f32_symbols = {};

  // Sets the sizes of the arrays and all that follows from them. Every size is at least 1 and N a
  // multiple of K.
  void SetSizes(int64_t B, int64_t T, int64_t S, int64_t N, int64_t K, int64_t H, int64_t Hv);

  int64_t& operator[](Symbol symbol) { return symbols[static_cast<size_t>(symbol)]; }
  int64_t operator[](Symbol symbol) const { return symbols[static_cast<size_t>(symbol)]; }
  int64_t operator[](const Extent& extent) const {
    return extent.symbol ? (*this)[*extent.symbol] : extent.constant;
  }
  float& operator[](F32Symbol symbol) { return f32_symbols[static_cast<size_t>(symbol)]; }
  float operator[](F32Symbol symbol) const { return f32_symbols[static_cast<size_t>(symbol)]; }
  std::optional<Array>& operator[](Operand operand) {
    return arrays[static_cast<size_t>(operand)];
  }
  const std::optional<Array>& operator[](Operand operand) const {
    return arrays[static_cast<size_t>(operand)];
  }
  // Whether the call has this array, rather than none or an absent optional one.
  bool has(Operand operand) const {
    const std::optional<Array>& array = (*this)[operand];
    return array && array->address != nullptr;
  }
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_OPERANDS_H_
