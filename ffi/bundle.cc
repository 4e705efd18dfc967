#include "bundle.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

namespace fa4_jax {
namespace {

constexpr std::string_view kHeader = "fa4_jax-bundle 1";

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

// The whole of `text` as a number within [low, high].
template <typename Integer>
bool ReadNumber(std::string_view text, Integer low, Integer high, Integer* value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= low &&
         *value <= high;
}

std::optional<ElementType> FindDtype(std::string_view name) {
  for (ElementType type : {ElementType::kBF16, ElementType::kF16}) {
    if (Name(type) == name) return type;
  }
  return std::nullopt;
}

// In the order of MaskKind and Logits.
constexpr std::string_view kMasks[] = {"full", "causal", "window", "segments"};
constexpr std::string_view kLogits[] = {"plain", "capped"};

template <typename Enum, size_t n>
std::optional<Enum> Find(const std::string_view (&names)[n], std::string_view name) {
  for (size_t i = 0; i < n; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

std::string Text(const KernelRequest& request) {
  return std::string(Name(request.operation)) + " of " + std::string(Name(request.dtype)) +
         ", head dim " + std::to_string(request.head_dim) + ", mask " +
         std::string(kMasks[static_cast<size_t>(request.mask)]) + ", logits " +
         std::string(kLogits[static_cast<size_t>(request.logits)]);
}

// Each Read* function takes the words after the key and returns whether it understood them.
using Words = std::vector<std::string_view>;

bool ReadSelect(const Words& words, KernelRecord* kernel) {
  if (words.size() != 2) return false;
  if (words[0] == "dtype") {
    kernel->dtype = FindDtype(words[1]);
    return kernel->dtype.has_value();
  }
  if (words[0] == "head_dim") {
    return ReadNumber<int64_t>(words[1], 1, 1 << 20, &kernel->head_dim.emplace());
  }
  if (words[0] == "mask") {
    kernel->mask = Find<MaskKind>(kMasks, words[1]);
    return kernel->mask.has_value();
  }
  if (words[0] == "logits") {
    kernel->logits = Find<Logits>(kLogits, words[1]);
    return kernel->logits.has_value();
  }
  return false;
}

bool ReadCluster(const Words& words, KernelRecord* kernel) {
  return words.size() == 3 && ReadNumber<uint32_t>(words[0], 1, 16, &kernel->cluster) &&
         words[1] == "1" && words[2] == "1";
}

bool ReadGrid(const Words& words, KernelRecord* kernel) {
  constexpr int64_t kMax = 1 << 30;
  if (words.size() == 3 && words[1] == "limit") {
    constexpr std::string_view kPrefix = "num_sms*";
    if (words[2].substr(0, kPrefix.size()) != kPrefix ||
        !ReadNumber<int64_t>(words[2].substr(kPrefix.size()), 1, 64,
                             &kernel->ctas_per_sm.emplace())) {
      return false;
    }
  } else if (words.size() != 1) {
    return false;
  }
  for (std::string_view text : Split(words[0], '*')) {
    GridFactor& factor = kernel->grid.emplace_back();
    if (ReadNumber<int64_t>(text, 1, kMax, &factor.constant)) continue;
    Words parts = Split(text, '/');
    factor.symbol = FindSymbol(parts[0]);
    factor.constant = 1;
    if (!factor.symbol || parts.size() > 2 ||
        (parts.size() == 2 && !ReadNumber<int64_t>(parts[1], 1, kMax, &factor.constant))) {
      return false;
    }
  }
  return true;
}

bool ReadParameter(const Words& words, KernelRecord* kernel) {
  if (words.size() < 2 || kernel->parameters.size() == kMaxParameters) return false;
  Parameter& parameter = kernel->parameters.emplace_back();
  if (words[0] == "s32") {
    parameter.kind = Parameter::Kind::kS32;
    std::optional<Symbol> symbol = FindSymbol(words[1]);
    parameter.symbol = symbol.value_or(Symbol::kB);
    return symbol && words.size() == 2;
  }
  if (words[0] == "f32") {
    parameter.kind = Parameter::Kind::kF32;
    std::optional<F32Symbol> symbol = FindF32Symbol(words[1]);
    parameter.f32_symbol = symbol.value_or(F32Symbol::kLogitsSoftCap);
    return symbol && words.size() == 2;
  }
  std::optional<Operand> operand = FindOperand(words[1]);
  if (!operand) return false;
  parameter.operand = *operand;
  if (words[0] == "pointer") {
    parameter.kind = Parameter::Kind::kPointer;
    return words.size() == 2;
  }
  // tensor_map OPERAND box N... swizzle N [packed]
  parameter.kind = Parameter::Kind::kTensorMap;
  size_t rank = static_cast<size_t>(Describe(*operand).rank);
  parameter.packed = words.back() == "packed";
  if (words[0] != "tensor_map" || words.size() != 5 + rank + parameter.packed ||
      words[2] != "box" || words[3 + rank] != "swizzle") {
    return false;
  }
  if (parameter.packed) {  // heads of queries, [B, T, N, ...]
    const auto& dimensions = Describe(*operand).dimensions;
    if (rank != 4 || dimensions[1].symbol != Symbol::kT || dimensions[2].symbol != Symbol::kN) {
      return false;
    }
  }
  for (size_t i = 0; i < rank; ++i) {
    if (!ReadNumber<uint32_t>(words[3 + i], 1, kMaxBox, &parameter.box[i])) return false;
  }
  return ReadNumber<int>(words[4 + rank], 0, 128, &parameter.swizzle) &&
         (parameter.swizzle == 0 || parameter.swizzle == 32 || parameter.swizzle == 64 ||
          parameter.swizzle == 128);
}

bool ReadLine(std::string_view key, const Words& words, KernelRecord* kernel) {
  if (key == "select") return ReadSelect(words, kernel);
  if (key == "cluster") return ReadCluster(words, kernel);
  if (key == "grid") return ReadGrid(words, kernel);
  if (key == "param") return ReadParameter(words, kernel);
  if (words.size() != 1) return false;
  if (key == "kernel") {
    kernel->name = words[0];
    return true;
  }
  if (key == "architecture") {
    kernel->architecture = words[0];
    return true;
  }
  if (key == "entry") {
    kernel->entry = words[0];
    return true;
  }
  if (key == "operation") {
    std::optional<Operation> operation = FindOperation(words[0]);
    kernel->operation = operation.value_or(Operation::kForward);
    return operation.has_value();
  }
  if (key == "threads") return ReadNumber<uint32_t>(words[0], 32, 1024, &kernel->threads);
  if (key == "shared") return ReadNumber<uint32_t>(words[0], 0, 1 << 20, &kernel->shared);
  uint32_t ignored;
  return key == "registers" && ReadNumber<uint32_t>(words[0], 0, 1024, &ignored);
}

template <typename Range>
std::string Join(const Range& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

}  // namespace

KernelRequest MakeRequest(Operation operation, const Call& call) {
  auto mask = [&] {
    bool left = call[Symbol::kWindowLeft] < kUnlimited;
    bool right = call[Symbol::kWindowRight] < kUnlimited;
    if (call.has(Operand::kQuerySegmentIds)) return MaskKind::kSegments;
    if (call[F32Symbol::kLogitsSoftCap] > 0) return MaskKind::kWindow;  // no others are built
    if (!left && !right) return MaskKind::kFull;
    return !left && call[Symbol::kWindowRight] == 0 ? MaskKind::kCausal : MaskKind::kWindow;
  };
  return {operation, call[Operand::kQuery]->element_type,
          std::max(call[Symbol::kH], call[Symbol::kHv]), mask(),
          call[F32Symbol::kLogitsSoftCap] > 0 ? Logits::kCapped : Logits::kPlain};
}

Status Bundle::Parse(const std::string& manifest, Bundle* bundle) {
  std::istringstream stream(manifest);
  std::string line;
  int number = 1;
  auto error = [&](const std::string& what) {
    return Status::Error("manifest line " + std::to_string(number) + ": " + what);
  };
  if (!std::getline(stream, line) || line != kHeader) {
    return error("expected '" + std::string(kHeader) + "', found '" + line + "'");
  }

  std::vector<KernelRecord> kernels;
  std::set<std::string> names;
  std::set<std::string, std::less<>> seen;  // keys of the block that is being read
  bool more = true;
  while (more) {
    ++number;
    more = static_cast<bool>(std::getline(stream, line));
    Words words = more ? Split(line, ' ') : Words();
    if (words.empty()) {  // the end of a block
      if (seen.empty()) continue;
      for (std::string_view key :
           {"architecture", "operation", "entry", "threads", "cluster", "shared", "grid"}) {
        if (seen.find(key) == seen.end()) {
          return error("kernel " + kernels.back().name + " has no " + std::string(key) + " line");
        }
      }
      seen.clear();
      continue;
    }
    std::string_view key = words[0];
    if (key == "kernel") {
      if (!seen.empty()) return error("a blank line is missing before a kernel line");
      kernels.emplace_back();
    } else if (seen.empty()) {
      return error("a block starts with a kernel line, found '" + line + "'");
    }
    if (!seen.emplace(key).second && key != "select" && key != "param") {
      return error("a second " + std::string(key) + " line");
    }
    if (!ReadLine(key, Words(words.begin() + 1, words.end()), &kernels.back())) {
      return error("cannot read '" + line + "'");
    }
    if (key == "kernel" && !names.insert(kernels.back().name).second) {
      return error("a second kernel named " + kernels.back().name);
    }
  }
  if (kernels.empty()) return Status::Error("the manifest holds no kernel");
  bundle->kernels_ = std::move(kernels);
  return Status();
}

Status Bundle::Open(const std::string& directory, Bundle* bundle) {
  std::string path = directory + "/manifest.txt";
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) return Status::Error("cannot read " + path);
  if (Status status = Parse(text, bundle); !status.ok()) {
    return Status::Error(path + ": " + status.message());
  }
  bundle->directory_ = directory;
  return Status();
}

std::vector<std::string> Bundle::architectures() const {
  std::vector<std::string> found;
  for (const KernelRecord& kernel : kernels_) {
    if (std::find(found.begin(), found.end(), kernel.architecture) == found.end()) {
      found.push_back(kernel.architecture);
    }
  }
  return found;
}

Status Bundle::ChooseArchitecture(const Device& device, std::string* architecture) const {
  std::vector<std::string> held = architectures();
  *architecture = device.architecture.empty() ? held.front() : device.architecture;
  if (std::find(held.begin(), held.end(), *architecture) != held.end()) return Status();
  return Status::Error("this build of fa4_jax has no kernels for " + device.name +
                       " (compute capability " + device.compute_capability + ", " + *architecture +
                       "); the bundle holds " + Join(held));
}

Status Bundle::Find(const std::string& architecture, const KernelRequest& request,
                    const KernelRecord** kernel) const {
  // Smaller is better.
  auto rank = [&](const KernelRecord& candidate) {
    int mask = !candidate.mask ? 1 : *candidate.mask == request.mask ? 0 : 2;
    return std::make_pair(candidate.head_dim.value_or(0), mask);
  };
  auto serves = [&](MaskKind mask) {
    return mask == request.mask ||
           (mask == MaskKind::kWindow && request.mask != MaskKind::kSegments);
  };
  *kernel = nullptr;
  for (const KernelRecord& candidate : kernels_) {
    if (candidate.architecture == architecture && candidate.operation == request.operation &&
        candidate.dtype.value_or(request.dtype) == request.dtype &&
        candidate.head_dim.value_or(request.head_dim) >= request.head_dim &&
        candidate.logits.value_or(request.logits) == request.logits &&
        serves(candidate.mask.value_or(request.mask)) &&
        (*kernel == nullptr || rank(candidate) < rank(**kernel))) {
      *kernel = &candidate;
    }
  }
  if (*kernel != nullptr) return Status();
  std::vector<std::string_view> held, operations;
  for (const KernelRecord& candidate : kernels_) {
    if (candidate.architecture != architecture) continue;
    if (candidate.operation == request.operation) held.push_back(candidate.name);
    std::string_view name = Name(candidate.operation);
    if (std::find(operations.begin(), operations.end(), name) == operations.end()) {
      operations.push_back(name);
    }
  }
  return Status::Error(
      "no " + architecture + " kernel for " + Text(request) + "; the bundle holds " +
      (held.empty() ? "none for this operation, only for " + Join(operations) : Join(held)));
}

Status Bundle::ReadImage(const KernelRecord& kernel, const std::string& extension,
                         std::string* image) const {
  std::string path = directory_ + "/" + kernel.architecture + "/" + kernel.name + extension;
  std::ifstream file(path, std::ios::binary);
  image->assign(std::istreambuf_iterator<char>(file), {});
  if (!file || image->empty()) return Status::Error("cannot read " + path);
  return Status();
}

}  // namespace fa4_jax
