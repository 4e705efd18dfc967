// The kernel bundle: reads manifest.txt (its format: kernels/abi.py, KernelSpec.to_manifest) and
// answers which kernel serves a call on an architecture.

#ifndef FA4_JAX_FFI_BUNDLE_H_
#define FA4_JAX_FFI_BUNDLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "driver.h"
#include "operands.h"
#include "status.h"

namespace fa4_jax {

// Which keys a call's queries can see, as far as kernels are specialised for it. A window kernel
// serves full and causal calls too; a segments kernel is one for windows that also compares ids.
enum class MaskKind { kFull, kCausal, kWindow, kSegments };

// What becomes of a score before the mask.
enum class Logits { kPlain, kCapped };

struct GridFactor {
  std::optional<Symbol> symbol;  // absent: the constant alone
  int64_t constant = 1;          // divisor of the symbol (rounded up), or the factor itself
};

struct Parameter {
  enum class Kind { kTensorMap, kPointer, kS32, kF32 };
  Kind kind = Kind::kPointer;
  Operand operand = Operand::kQuery;  // of a tensor map or pointer
  Symbol symbol = Symbol::kB;         // of an integer
  F32Symbol f32_symbol = F32Symbol::kLogitsSoftCap;
  // Of a tensor map; the box innermost first.
  std::array<uint32_t, kMaxRank> box = {};
  int swizzle = 0;
  // At launch dimension 1 of the box (heads) is multiplied and dimension 2 (positions) divided by
  // Symbol::kPack.
  bool packed = false;
};

constexpr size_t kMaxParameters = 32;
constexpr uint32_t kMaxBox = 256;  // elements of a dimension, by the hardware

struct KernelRecord {
  std::string name;
  std::string architecture;
  Operation operation = Operation::kForward;
  std::string entry;
  // What a call must have to be served; an absent one does not matter to the kernel.
  std::optional<ElementType> dtype;
  std::optional<int64_t> head_dim;  // serves this and less
  std::optional<MaskKind> mask;
  std::optional<Logits> logits;
  uint32_t threads = 0;
  uint32_t cluster = 1;
  uint32_t shared = 0;
  std::vector<GridFactor> grid;
  std::optional<int64_t> ctas_per_sm;  // of a persistent grid
  std::vector<Parameter> parameters;
};

// What a call needs of a kernel.
struct KernelRequest {
  Operation operation = Operation::kForward;
  ElementType dtype = ElementType::kBF16;
  int64_t head_dim = 0;  // max(H, Hv)
  MaskKind mask = MaskKind::kFull;
  Logits logits = Logits::kPlain;

  bool operator<(const KernelRequest& other) const { return key() < other.key(); }

 private:
  std::tuple<Operation, ElementType, int64_t, MaskKind, Logits> key() const {
    return {operation, dtype, head_dim, mask, logits};
  }
};

// A window side without limit; fa4_jax/custom_calls.py passes it.
constexpr int64_t kUnlimited = int64_t{1} << 30;

// What `operation` of a call whose query is set needs. All operations of a call get the same answer
// but for the operation, so that their kernels agree on what passes between them. An offset moves
// the diagonal, so it matters to every kind of mask but kFull; all of them read it at run time.
KernelRequest MakeRequest(Operation operation, const Call& call);

class Bundle {
 public:
  // The error names the line.
  static Status Parse(const std::string& manifest, Bundle* bundle);

  // Reads `directory`/manifest.txt; images are read later, when they are needed.
  static Status Open(const std::string& directory, Bundle* bundle);

  const std::vector<KernelRecord>& kernels() const { return kernels_; }

  // In the order of the manifest, without repetition.
  std::vector<std::string> architectures() const;

  // Fails, naming the device and the architectures at hand, when the bundle holds nothing for the
  // device. Otherwise the architecture to ask Find for.
  Status ChooseArchitecture(const Device& device, std::string* architecture) const;

  // The kernel with the smallest head_dim that is enough; among those the one that names the mask,
  // before one to which the mask does not matter, before the one for windows. The pointer lives as
  // long as the bundle.
  Status Find(const std::string& architecture, const KernelRequest& request,
              const KernelRecord** kernel) const;

  // The whole file of a kernel; extension ".cubin" or ".ptx".
  Status ReadImage(const KernelRecord& kernel, const std::string& extension,
                   std::string* image) const;

 private:
  std::string directory_;
  std::vector<KernelRecord> kernels_;
};

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_BUNDLE_H_
