// Lets tests/test_ffi.py look at the C++ side below the XLA handlers: the manifest parser, the
// kernel choice and the launcher, over a driver that only writes down what it is asked.
//
//   ffi_probe tables
//   ffi_probe parse                                   < manifest
//   ffi_probe find ARCH OPERATION DTYPE HEAD_DIM LEFT RIGHT SEGMENTS CAP   < manifest
//   ffi_probe launch DIRECTORY SMS OPERATION B T S N K H Hv LEFT RIGHT SEGMENTS CAP
//   ffi_probe threads DIRECTORY OPERATION

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "bundle.h"
#include "driver.h"
#include "launch.h"
#include "operands.h"

namespace fa4_jax {
namespace {

class WritingDriver : public Driver {
 public:
  explicit WritingDriver(int num_sms) : num_sms_(num_sms) {}

  const char* image_extension() const override { return ".cubin"; }

  Status GetDevice(int32_t ordinal, Device* device) override {
    device->name = "Probe " + std::to_string(ordinal);
    device->architecture = "sm_90a";
    device->compute_capability = "9.0";
    device->num_sms = num_sms_;
    return Status();
  }

  Status LoadLibrary(int32_t, const std::string& image, LibraryHandle* library) override {
    ++libraries;
    if (image.find("broken") != std::string::npos) return Status::Error("load: broken image");
    library->value = this;
    return Status();
  }

  Status GetKernel(int32_t, LibraryHandle, const KernelRequirements& requirements,
                   KernelHandle* kernel) override {
    ++kernels;
    entry_ = requirements.entry;
    kernel->value = this;
    return Status();
  }

  Status EncodeTensorMap(const TensorMapConfig& config, TensorMap* map) override {
    map->words[0] = reinterpret_cast<uint64_t>(config.address);
    std::cout << "map dimensions";
    for (int i = 0; i < config.rank; ++i) std::cout << " " << config.dimensions[i];
    std::cout << " strides";
    for (int i = 0; i + 1 < config.rank; ++i) std::cout << " " << config.strides[i];
    std::cout << " box";
    for (int i = 0; i < config.rank; ++i) std::cout << " " << config.box[i];
    std::cout << " swizzle " << config.swizzle << "\n";
    return Status();
  }

  Status Launch(KernelHandle, const LaunchConfig& config) override {
    std::cout << "launch " << entry_ << " grid " << config.grid << " threads " << config.threads
              << " cluster " << config.cluster << " shared " << config.shared << "\n";
    for (size_t i = 0; i < config.num_buffers; ++i) {
      std::cout << "buffer " << config.buffers[i].name << " " << config.buffers[i].bytes
                << (config.buffers[i].writable ? " result" : "") << "\n";
    }
    params = config.params;
    for (const Parameter& parameter : record->parameters) {
      void* value = *params++;
      if (parameter.kind == Parameter::Kind::kS32) {
        std::cout << "s32 " << *static_cast<int32_t*>(value) << "\n";
      } else if (parameter.kind == Parameter::Kind::kF32) {
        std::cout << "f32 " << *static_cast<float*>(value) << "\n";
      } else if (parameter.kind == Parameter::Kind::kPointer) {
        std::cout << "pointer " << *static_cast<uintptr_t*>(value) << "\n";
      } else {
        std::cout << "tensor_map " << static_cast<TensorMap*>(value)->words[0] << "\n";
      }
    }
    return Status();
  }

  const KernelRecord* record = nullptr;
  std::atomic<int> libraries{0};
  std::atomic<int> kernels{0};

 private:
  int num_sms_;
  std::string entry_;
  void** params = nullptr;
};

int Print(const Status& status) {
  std::cout << (status.ok() ? "ok" : "error: " + status.message()) << "\n";
  return 0;
}

std::string ReadInput() { return {std::istreambuf_iterator<char>(std::cin), {}}; }

// A call of the forward operation. Every operand's address is its index, from 1, times 4096;
// query_offset is absent, and so are the arrays of segments unless `attributes` say otherwise.
//
//   sizes        B T S N K H Hv
//   attributes   LEFT RIGHT SEGMENTS CAP
Call MakeCall(ElementType dtype, const int64_t* sizes, char** attributes) {
  Call call;
  call.SetSizes(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]);
  call[Symbol::kRowBlocks] = (call[Symbol::kT] + kSegmentRows - 1) / kSegmentRows;
  call[Symbol::kWindowLeft] = atoll(attributes[0]);
  call[Symbol::kWindowRight] = atoll(attributes[1]);
  bool segments = atoi(attributes[2]) != 0;
  call[F32Symbol::kLogitsSoftCap] = static_cast<float>(atof(attributes[3]));
  for (size_t i = 0; i <= static_cast<size_t>(Operand::kLse); ++i) {
    auto operand = static_cast<Operand>(i);
    const OperandInfo& info = Describe(operand);
    Array array;
    array.element_type = info.element_type.value_or(dtype);
    array.writable = operand == Operand::kOut || operand == Operand::kLse;
    bool of_segments = operand == Operand::kQuerySegmentIds ||
                       operand == Operand::kKeyValueSegmentIds ||
                       operand == Operand::kSegmentBounds;
    if (of_segments ? segments : operand != Operand::kQueryOffset) {
      array.rank = info.rank;
      array.address = reinterpret_cast<void*>(4096 * (i + 1));
      for (int d = 0; d < info.rank; ++d) array.dimensions[d] = call[info.dimensions[d]];
    }
    call[operand] = array;
  }
  return call;
}

int Find(char** arguments) {
  Bundle bundle;
  Status status = Bundle::Parse(ReadInput(), &bundle);
  if (!status.ok()) return Print(status);
  auto dtype = std::string(arguments[2]) == "f16" ? ElementType::kF16 : ElementType::kBF16;
  int64_t head_dim = atoll(arguments[3]);
  int64_t sizes[] = {1, 1, 1, 1, 1, head_dim, 8};
  Call call = MakeCall(dtype, sizes, arguments + 4);
  const KernelRecord* kernel;
  status = bundle.Find(arguments[0], MakeRequest(*FindOperation(arguments[1]), call), &kernel);
  if (!status.ok()) return Print(status);
  std::cout << kernel->name << "\n";
  return 0;
}

int LaunchOne(char** arguments) {
  Bundle bundle;
  Status status = Bundle::Open(arguments[0], &bundle);
  if (!status.ok()) return Print(status);
  int64_t sizes[7];
  for (int i = 0; i < 7; ++i) sizes[i] = atoll(arguments[3 + i]);
  Call call = MakeCall(ElementType::kBF16, sizes, arguments + 10);
  WritingDriver driver(atoi(arguments[1]));
  KernelStore store(driver, bundle);
  KernelRequest request = MakeRequest(*FindOperation(arguments[2]), call);
  const LoadedKernel* kernel;
  status = store.Get(0, request, &kernel);
  if (status.ok()) return Print(Status::Error("Get succeeded before Load"));
  status = store.Load(0, request);
  if (status.ok()) status = store.Get(0, request, &kernel);
  if (!status.ok()) return Print(status);
  driver.record = kernel->record;
  return Print(Launch(driver, *kernel, call, nullptr));
}

int PrintTables() {
  for (size_t i = 0; i < kNumOperands; ++i) {
    const OperandInfo& info = Describe(static_cast<Operand>(i));
    std::cout << "operand " << info.name << " "
              << (info.element_type ? Name(*info.element_type) : "data");
    for (int d = 0; d < info.rank; ++d) std::cout << " " << Name(info.dimensions[d]);
    std::cout << "\n";
  }
  for (size_t i = 0; i < kNumSymbols; ++i) {
    std::cout << "s32 " << Name(static_cast<Symbol>(i)) << "\n";
  }
  for (size_t i = 0; i < kNumF32Symbols; ++i) {
    std::cout << "f32 " << Name(static_cast<F32Symbol>(i)) << "\n";
  }
  return 0;
}

int LoadFromThreads(char** arguments) {
  Bundle bundle;
  Status status = Bundle::Open(arguments[0], &bundle);
  if (!status.ok()) return Print(status);
  WritingDriver driver(4);
  KernelStore store(driver, bundle);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 200; ++i) {
        KernelRequest request{*FindOperation(arguments[1]), ElementType::kBF16, 8 * (1 + i % 8),
                              MaskKind::kCausal, Logits::kPlain};
        int32_t device = (thread + i) % 2;
        const LoadedKernel* kernel = nullptr;
        if (!store.Load(device, request).ok() || !store.Get(device, request, &kernel).ok()) {
          ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::cout << "libraries " << driver.libraries << " kernels " << driver.kernels << " failures "
            << failures << "\n";
  return 0;
}

}  // namespace
}  // namespace fa4_jax

int main(int argc, char** argv) {
  std::string command = argc > 1 ? argv[1] : "";
  if (command == "tables") return fa4_jax::PrintTables();
  if (command == "parse") {
    fa4_jax::Bundle bundle;
    return fa4_jax::Print(fa4_jax::Bundle::Parse(fa4_jax::ReadInput(), &bundle));
  }
  if (command == "find" && argc == 10) return fa4_jax::Find(argv + 2);
  if (command == "launch" && argc == 16) return fa4_jax::LaunchOne(argv + 2);
  if (command == "threads" && argc == 4) return fa4_jax::LoadFromThreads(argv + 2);
  std::cerr << "unknown command\n";
  return 2;
}
