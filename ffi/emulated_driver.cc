// The driver interface over the PTX emulator: the same kernels, parameters and tensor maps as on a GPU, executed on the
// CPU. A launch returns when the grid is done; whatever the kernel did wrong is the launch's error.
//
// Environment, read once, the device that is pretended:
//   FA4_JAX_EMULATED_ARCH   the architecture ("sm_90a", "sm_100a"); unset: whatever the bundle has
//   FA4_JAX_EMULATED_SMS    its number of SMs, what persistent grids are sized by; 8 when unset
// Environment, read at each launch, how the kernel is run:
//   FA4_JAX_EMULATED_SEED   a positive seed makes schedules adversarial and reproducible; unset or 0: deterministic
//   FA4_JAX_EMULATED_RACES  1 reports conflicting accesses that nothing orders
//   FA4_JAX_EMULATED_TRACE  a file that each launch without an error appends one line to: its counts as JSON

#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "emulator/machine.h"
#include "emulator/program.h"
#include "emulator/tensor_map.h"

namespace fa4_jax {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

struct PretendedDevice {
  std::string architecture = Environment("FA4_JAX_EMULATED_ARCH");
  int num_sms = 8;
  PretendedDevice() {
    if (int sms = std::atoi(Environment("FA4_JAX_EMULATED_SMS").c_str()); sms > 0) num_sms = sms;
  }
};

const PretendedDevice& GetPretendedDevice() {
  static const PretendedDevice device;
  return device;
}

struct EmulatedKernel {
  const emulator::Program* program;
  std::string name;
};

emulator::TensorType TypeOf(ElementType type) {
  switch (type) {
    case ElementType::kBF16:
      return emulator::TensorType::kBF16;
    case ElementType::kF16:
      return emulator::TensorType::kF16;
    case ElementType::kF32:
      return emulator::TensorType::kF32;
    case ElementType::kS32:
      return emulator::TensorType::kS32;
  }
  return emulator::TensorType::kU8;
}

class Emulated : public Driver {
 public:
  const char* image_extension() const override { return ".ptx"; }

  Status GetDevice(int32_t ordinal, Device* device) override {
    if (ordinal != 0) return Status::Error("the emulator is one device, number 0");
    const PretendedDevice& pretended = GetPretendedDevice();
    device->name = "PTX emulator";
    device->architecture = pretended.architecture;
    device->num_sms = pretended.num_sms;
    std::string digits;
    for (char c : pretended.architecture) {
      if (c >= '0' && c <= '9') digits += c;
    }
    device->compute_capability =
        digits.size() < 2 ? "any" : digits.substr(0, digits.size() - 1) + "." + digits.back();
    return Status();
  }

  Status LoadLibrary(int32_t, const std::string& image, LibraryHandle* library) override {
    try {
      std::unique_ptr<emulator::Module> module = emulator::load_module(image);
      library->value = module.get();
      std::lock_guard<std::mutex> lock(mutex_);
      modules_.push_back(std::move(module));
    } catch (const std::exception& error) {
      return Status::Error(std::string("emulator: ") + error.what());
    }
    return Status();
  }

  Status GetKernel(int32_t, LibraryHandle library, const KernelRequirements& requirements,
                   KernelHandle* kernel) override {
    auto& entries = static_cast<emulator::Module*>(library.value)->entries;
    auto found = entries.find(requirements.entry);
    if (found == entries.end()) {
      return Status::Error("emulator: the PTX has no entry " + requirements.entry);
    }
    auto fresh = std::make_unique<EmulatedKernel>();
    fresh->program = found->second.get();
    fresh->name = requirements.name;
    kernel->value = fresh.get();
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_.push_back(std::move(fresh));
    return Status();
  }

  Status EncodeTensorMap(const TensorMapConfig& config, TensorMap* map) override {
    static_assert(sizeof(TensorMap) == sizeof(emulator::TensorMapBits));
    constexpr int kInterleaveNone = 0, kL2Promotion128 = 2, kFillZero = 0;
    const uint32_t steps[kMaxTensorMapRank] = {1, 1, 1, 1, 1};
    int swizzle = config.swizzle == 128 ? 3 : config.swizzle == 64 ? 2 : config.swizzle == 32 ? 1 : 0;
    const char* why = nullptr;
    int result = emulator::encode_tiled(
        reinterpret_cast<emulator::TensorMapBits*>(map), static_cast<int>(TypeOf(config.element_type)),
        static_cast<uint32_t>(config.rank), reinterpret_cast<uint64_t>(config.address),
        config.dimensions, config.strides, config.box, steps, kInterleaveNone, swizzle,
        kL2Promotion128, kFillZero, &why);
    if (result != 0) return Status::Error(std::string("emulator: ") + (why ? why : "invalid"));
    return Status();
  }

  Status Launch(KernelHandle handle, const LaunchConfig& config) override {
    const auto& kernel = *static_cast<const EmulatedKernel*>(handle.value);
    const emulator::Program& program = *kernel.program;
    emulator::LaunchRequest request;
    request.grid[0] = config.grid;
    request.block[0] = config.threads;
    request.cluster[0] = config.cluster;
    request.dynamic_shared = config.shared;
    std::vector<uint8_t> parameters(program.parameter_bytes);
    for (size_t i = 0; i < program.parameters.size(); ++i) {
      const emulator::Parameter& parameter = program.parameters[i];
      std::memcpy(&parameters[parameter.offset], config.params[i], parameter.size);
    }
    request.parameters = parameters.data();
    for (size_t i = 0; i < config.num_buffers; ++i) {
      const BufferRange& buffer = config.buffers[i];
      if (buffer.address == nullptr || buffer.bytes == 0) continue;
      request.regions.push_back(
          {buffer.name, static_cast<uint8_t*>(buffer.address), buffer.bytes, buffer.writable});
    }
    const std::string trace = Environment("FA4_JAX_EMULATED_TRACE");
    request.options.num_sms = GetPretendedDevice().num_sms;
    request.options.seed = std::strtoull(Environment("FA4_JAX_EMULATED_SEED").c_str(), nullptr, 10);
    request.options.check_races = Environment("FA4_JAX_EMULATED_RACES") == "1";
    request.options.trace = !trace.empty();
    emulator::LaunchResult result = emulator::launch(program, request);
    if (!result.error.empty()) return Status::Error("emulator: " + result.error);
    if (!trace.empty()) return AppendTrace(trace, kernel.name, request.options.seed, result.trace);
    return Status();
  }

 private:
  // One line, so that the file can be read launch by launch: the trace after the kernel's name in the bundle and the seed.
  Status AppendTrace(const std::string& path, const std::string& name, uint64_t seed, std::string trace) {
    for (char& c : trace) {
      if (c == '\n') c = ' ';
    }
    std::string line = "{\"name\": \"" + name + "\", \"seed\": " + std::to_string(seed) + ", " +
                       trace.substr(trace.find('{') + 1) + "\n";
    std::lock_guard<std::mutex> lock(mutex_);
    std::ofstream file(path, std::ios::app);
    if (!file.write(line.data(), static_cast<std::streamsize>(line.size())).flush()) {
      return Status::Error("emulator: cannot write FA4_JAX_EMULATED_TRACE=" + path);
    }
    return Status();
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<emulator::Module>> modules_;
  std::vector<std::unique_ptr<EmulatedKernel>> kernels_;
};

}  // namespace

Driver& EmulatedDriver() {
  static auto* driver = new Emulated;
  return *driver;
}

}  // namespace fa4_jax
