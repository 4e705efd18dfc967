// Small calls of every Hopper kernel of a bundle, forward and backward, on a GPU, for a memory
// checker (tests/test_memcheck.py):
//
//   compute-sanitizer memcheck BUNDLE [OPERAND]
//
// Every array is an allocation of its own and exactly as large as the kernels may assume, which XLA
// does not grant; OPERAND's are half as large, so that the checker has something to find. Sizes are
// no multiples of a tile.

#include <dlfcn.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "bundle.h"
#include "driver.h"
#include "launch.h"
#include "operands.h"

namespace fa4_jax {
namespace {

constexpr int64_t kUnlimited = 1 << 30;

// What the driver interface leaves to XLA. Any failure ends the program.
class Memory {
 public:
  Memory() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) Fail("libcuda.so.1 not found");
    void* context;
    Call<int(unsigned)>("cuInit", 0u);
    Call<int(void**, int)>("cuDevicePrimaryCtxRetain", &context, 0);
    Call<int(void*)>("cuCtxSetCurrent", context);
  }

  void* Copy(const std::vector<char>& bytes) {
    void* address;
    Call<int(void**, size_t)>("cuMemAlloc_v2", &address, bytes.size());
    Call<int(void*, const void*, size_t)>("cuMemcpyHtoD_v2", address, bytes.data(), bytes.size());
    return address;
  }

  void Free(void* address) { Call<int(void*)>("cuMemFree_v2", address); }
  void Synchronise() { Call<int()>("cuCtxSynchronize"); }

  [[noreturn]] static void Fail(const std::string& text) {
    std::cerr << text << "\n";
    std::exit(1);
  }

 private:
  template <typename Function, typename... Arguments>
  void Call(const char* name, Arguments... arguments) {
    auto* function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (function == nullptr) Fail(std::string(name) + " not found");
    if (int error = function(arguments...)) Fail(name + (" failed: " + std::to_string(error)));
  }

  void* library_;
};

struct Mask {
  const char* name;
  int64_t left, right;
  bool lengths, segments;
};
constexpr Mask kMasks[] = {
    {"full", kUnlimited, kUnlimited, true, false},
    {"causal", kUnlimited, 0, false, false},
    {"window", 40, 7, true, false},
    {"segments", kUnlimited, 0, true, true},
};

// Fills an array with what a caller might pass.
std::vector<char> Values(Operand operand, const Call& call, ElementType type, size_t count,
                         std::mt19937& random) {
  std::vector<char> bytes(count * Bytes(type));
  for (size_t i = 0; i < count; ++i) {
    int32_t word = 0;
    switch (operand) {
      case Operand::kQuerySeqLengths:
        word = static_cast<int32_t>(call[Symbol::kT] - 5);
        break;
      case Operand::kKeyValueSeqLengths:
        word = static_cast<int32_t>(call[Symbol::kS] - 9);
        break;
      case Operand::kQuerySegmentIds:
      case Operand::kKeyValueSegmentIds:
        word = static_cast<int32_t>(random() % 3);
        break;
      case Operand::kSegmentBounds:  // every column may share a segment, none need
        word = i % 4 == 1 ? static_cast<int32_t>(kUnlimited) : 0;
        break;
      default:  // +-1 to 2 in any of the types, by the upper bits; 0 for an offset
        if (type == ElementType::kF32) word = 0x3f800000;
        if (type == ElementType::kF16) word = 0x3c00 | (random() & 0x83ff);
        if (type == ElementType::kBF16) word = 0x3f80 | (random() & 0x807f);
    }
    for (size_t b = 0; b < Bytes(type); ++b) bytes[i * Bytes(type) + b] = word >> 8 * b & 0xff;
  }
  return bytes;
}

bool IsResult(Operand operand) {
  return operand == Operand::kOut || operand == Operand::kLse || operand >= Operand::kDq;
}

// One call: forward, then its gradients.
void RunCall(Memory& memory, KernelStore& store, ElementType type, int64_t head_dim,
             const Mask& mask, float cap, const int64_t* sizes, const std::string& small) {
  std::mt19937 random(1);
  Call call;
  call.SetSizes(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], head_dim, head_dim);
  call[Symbol::kWindowLeft] = mask.left;
  call[Symbol::kWindowRight] = mask.right;
  call[F32Symbol::kLogitsSoftCap] = cap;
  std::vector<void*> allocated;
  auto fill = [&](Operand operand) {
    const OperandInfo& info = Describe(operand);
    Array array;
    array.element_type = info.element_type.value_or(type);
    array.writable = IsResult(operand);
    bool of_segments = operand == Operand::kQuerySegmentIds ||
                       operand == Operand::kKeyValueSegmentIds ||
                       operand == Operand::kSegmentBounds;
    bool of_lengths =
        operand == Operand::kQuerySeqLengths || operand == Operand::kKeyValueSeqLengths;
    if ((mask.segments || !of_segments) && (mask.lengths || !of_lengths)) {
      array.rank = info.rank;
      size_t count = 1;
      for (int d = 0; d < info.rank; ++d) {
        array.dimensions[d] = call[info.dimensions[d]];
        count *= static_cast<size_t>(array.dimensions[d]);
      }
      std::vector<char> values = Values(operand, call, array.element_type, count, random);
      if (info.name == small) values.resize(values.size() / 2);
      array.address = memory.Copy(values);
      allocated.push_back(array.address);
    }
    call[operand] = array;
  };
  auto launch = [&](Operation operation) {
    KernelRequest request = MakeRequest(operation, call);
    const LoadedKernel* kernel;
    Status status = store.Load(0, request);
    if (status.ok()) status = store.Get(0, request, &kernel);
    if (status.ok()) status = Launch(store.driver(), *kernel, call, nullptr);
    if (!status.ok()) Memory::Fail(status.message());
    memory.Synchronise();
    std::cout << kernel->record->name << std::endl;
  };

  call[Symbol::kRowBlocks] = (call[Symbol::kT] + kSegmentRows - 1) / kSegmentRows;
  for (size_t i = 0; i < kNumOperands; ++i) fill(static_cast<Operand>(i));
  launch(Operation::kForward);
  call[Symbol::kRowBlocks] = (call[Symbol::kS] + kSegmentRows - 1) / kSegmentRows;
  fill(Operand::kSegmentBounds);  // of the keys
  launch(Operation::kBackwardPreprocess);
  launch(Operation::kBackward);
  launch(Operation::kBackwardPostprocess);
  for (void* address : allocated) memory.Free(address);
}

int Main(const std::string& directory, const std::string& small) {
  Bundle bundle;
  Status status = Bundle::Open(directory, &bundle);
  if (!status.ok()) Memory::Fail(status.message());
  Memory memory;
  KernelStore store(CudaDriver(), bundle);
  constexpr int64_t kSizes[][5] = {{2, 250, 129, 4, 2}, {2, 129, 250, 2, 2}, {1, 1, 63, 4, 1},
                                   {2, 65, 300, 2, 1}, {1, 300, 1, 2, 2}};
  size_t turn = 0;
  for (ElementType type : {ElementType::kBF16, ElementType::kF16}) {
    for (int64_t head_dim : {64, 72, 96, 128}) {
      for (const Mask& mask : kMasks) {
        for (float cap : {0.0f, 3.0f}) {
          RunCall(memory, store, type, head_dim, mask, cap, kSizes[turn++ % 5], small);
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace fa4_jax

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  return fa4_jax::Main(argv[1], argc > 2 ? argv[2] : "");
}
