#include "launch.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace fa4_jax {
namespace {

constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();  // along x, by the hardware

Status Error(const KernelRecord& kernel, const std::string& what) {
  return Status::Error("kernel " + kernel.name + ": " + what);
}

// Makes a box of positions of one head one of fewer positions of `pack` heads: dimension 1 counts
// heads, dimension 2 positions.
Status PackBox(int64_t pack, uint32_t* box) {
  auto factor = static_cast<uint32_t>(pack);
  if (box[2] % factor != 0 || box[1] * factor > kMaxBox) {
    return Status::Error(std::to_string(pack) + " heads cannot be packed into a box of " +
                         std::to_string(box[1]) + " x " + std::to_string(box[2]) +
                         " heads and positions");
  }
  box[1] *= factor;
  box[2] /= factor;
  return Status();
}

// The map over the operand's dense row-major array, dimensions innermost first.
Status Encode(Driver& driver, const Parameter& parameter, const Array& array, int64_t pack,
              TensorMap* map) {
  TensorMapConfig config;
  config.element_type = array.element_type;
  config.address = array.address;
  config.rank = array.rank;
  config.swizzle = parameter.swizzle;
  uint64_t stride = Bytes(array.element_type);
  for (int i = 0; i < array.rank; ++i) {
    auto size = static_cast<uint64_t>(array.dimensions[array.rank - 1 - i]);
    config.dimensions[i] = size;
    config.box[i] = parameter.box[i];
    stride *= size;
    if (i + 1 < array.rank) config.strides[i] = stride;
  }
  Status status;
  if (parameter.packed) status = PackBox(pack, config.box);
  if (status.ok()) status = driver.EncodeTensorMap(config, map);
  if (!status.ok()) {
    return Status::Error("tensor map of " + std::string(Describe(parameter.operand).name) + ": " +
                         status.message());
  }
  return Status();
}

}  // namespace

Status KernelStore::Load(int32_t device, const KernelRequest& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  const LoadedKernel* kernel;
  return LoadLocked(device, request, &kernel);
}

Status KernelStore::LoadLocked(int32_t device, const KernelRequest& request,
                               const LoadedKernel** kernel) {
  if (auto found = requests_.find({device, request}); found != requests_.end()) {
    *kernel = found->second;
    return Status();
  }

  auto state = devices_.find(device);
  if (state == devices_.end()) {
    DeviceState fresh;
    FA4_JAX_RETURN_IF_ERROR(driver_.GetDevice(device, &fresh.description));
    FA4_JAX_RETURN_IF_ERROR(
        bundle_.ChooseArchitecture(fresh.description, &fresh.architecture));
    state = devices_.emplace(device, std::move(fresh)).first;
  }

  const KernelRecord* record;
  if (Status status = bundle_.Find(state->second.architecture, request, &record); !status.ok()) {
    return Status::Error(state->second.description.name + ": " + status.message());
  }
  auto loaded = state->second.kernels.find(record);
  if (loaded == state->second.kernels.end()) {
    std::string image;
    FA4_JAX_RETURN_IF_ERROR(bundle_.ReadImage(*record, driver_.image_extension(), &image));
    LibraryHandle library;
    LoadedKernel fresh{record, KernelHandle(), state->second.description.num_sms};
    KernelRequirements requirements{record->name, record->entry, record->threads, record->cluster,
                                    record->shared};
    Status status = driver_.LoadLibrary(device, image, &library);
    if (status.ok()) status = driver_.GetKernel(device, library, requirements, &fresh.handle);
    if (!status.ok()) return Error(*record, status.message());
    loaded = state->second.kernels.emplace(record, fresh).first;
  }
  *kernel = requests_[{device, request}] = &loaded->second;
  return Status();
}

Status KernelStore::Get(int32_t device, const KernelRequest& request,
                        const LoadedKernel** kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = requests_.find({device, request});
  if (found == requests_.end()) {
    return Status::Error("no kernel was made ready on device " + std::to_string(device) +
                         ": the initialize stage of this custom call has not run");
  }
  *kernel = found->second;
  return Status();
}

Status GridSize(const KernelRecord& kernel, const Call& call, uint32_t* grid) {
  int64_t size = 1;
  for (const GridFactor& factor : kernel.grid) {
    int64_t value = factor.constant;
    if (factor.symbol) value = (call[*factor.symbol] + factor.constant - 1) / factor.constant;
    if (value < 1 || value > kMaxGrid) {
      return Error(kernel, "a grid factor is " + std::to_string(value));
    }
    // Both factors are below 2^31: no overflow. A persistent grid has no other bound than SMs.
    size *= value;
    if (size > kMaxGrid && !kernel.ctas_per_sm) {
      return Error(kernel, "the grid exceeds " + std::to_string(kMaxGrid) + " CTAs");
    }
    size = std::min(size, kMaxGrid);
  }
  if (kernel.ctas_per_sm) {
    size = std::min(size, *kernel.ctas_per_sm * call[Symbol::kNumSms]);
    size = std::max<int64_t>(size / kernel.cluster, 1) * kernel.cluster;
  }
  if (size % kernel.cluster != 0) {
    return Error(kernel, "a grid of " + std::to_string(size) + " CTAs is not whole clusters of " +
                             std::to_string(kernel.cluster));
  }
  *grid = static_cast<uint32_t>(size);
  return Status();
}

Status Launch(Driver& driver, const LoadedKernel& loaded, Call& call, void* stream) {
  const KernelRecord& kernel = *loaded.record;
  call[Symbol::kNumSms] = loaded.num_sms;

  LaunchConfig config;
  FA4_JAX_RETURN_IF_ERROR(GridSize(kernel, call, &config.grid));
  config.threads = kernel.threads;
  config.cluster = kernel.cluster;
  config.shared = kernel.shared;
  config.stream = stream;

  union Value {
    TensorMap map;
    void* pointer;
    int32_t integer;
    float real;
  };
  Value values[kMaxParameters];
  void* params[kMaxParameters];
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Parameter& parameter = kernel.parameters[i];
    params[i] = &values[i];
    if (parameter.kind == Parameter::Kind::kS32) {
      int64_t value = call[parameter.symbol];
      if (value != static_cast<int32_t>(value)) {
        return Error(kernel, std::string(Name(parameter.symbol)) + " = " + std::to_string(value) +
                                 " does not fit 32 bits");
      }
      values[i].integer = static_cast<int32_t>(value);
      continue;
    }
    if (parameter.kind == Parameter::Kind::kF32) {
      values[i].real = call[parameter.f32_symbol];
      continue;
    }
    const std::optional<Array>& array = call[parameter.operand];
    if (!array) {
      return Error(kernel, "this call has no operand " +
                               std::string(Describe(parameter.operand).name));
    }
    if (parameter.kind == Parameter::Kind::kPointer) {
      values[i].pointer = array->address;
    } else if (Status status = Encode(driver, parameter, *array, call[Symbol::kPack],
                                      &values[i].map);
               !status.ok()) {
      return Error(kernel, status.message());
    }
  }
  config.params = params;

  BufferRange buffers[kNumOperands];
  for (size_t i = 0; i < kNumOperands; ++i) {
    if (const std::optional<Array>& array = call.arrays[i]) {
      buffers[config.num_buffers++] = {Describe(static_cast<Operand>(i)).name.data(),
                                       array->address, array->bytes(), array->writable};
    }
  }
  config.buffers = buffers;

  if (Status status = driver.Launch(loaded.handle, config); !status.ok()) {
    return Error(kernel, status.message());
  }
  return Status();
}

}  // namespace fa4_jax
