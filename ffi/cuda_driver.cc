// The driver interface over libcuda, found at run time with dlopen: no CUDA toolkit is needed to
// build, no driver to load this library, and one binary serves every CUDA version from 13.0 on.
//
// The declarations below are those of the CUDA driver API that are used, with its names without
// the prefix; its ABI fixes the enumerators' values and the structures' layouts.

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "driver.h"

namespace fa4_jax {
namespace {

using Result = int;  // CUresult; 0 is success
using DeviceId = int;
struct ContextTag;
struct LibraryTag;
struct KernelTag;
struct FunctionTag;
struct StreamTag;
using Context = ContextTag*;
using Library = LibraryTag*;
using Kernel = KernelTag*;
using Function = FunctionTag*;
using Stream = StreamTag*;

// CUdevice_attribute
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

// CUfunction_attribute
constexpr int kMaxDynamicSharedSizeBytes = 8;
constexpr int kNonPortableClusterSizeAllowed = 14;
constexpr uint32_t kPortableClusterSize = 8;

// CUtensorMapDataType, ...Swizzle, ...L2promotion, ...
constexpr int kTensorMapInt32 = 3;
constexpr int kTensorMapFloat16 = 6;
constexpr int kTensorMapFloat32 = 7;
constexpr int kTensorMapBFloat16 = 9;
constexpr int kInterleaveNone = 0;
constexpr int kL2Promotion128 = 2;
constexpr int kFillZero = 0;

// CUlaunchAttribute
constexpr int kLaunchAttributeClusterDimension = 4;
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    uint32_t cluster[3];
    char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

// CUlaunchConfig
struct DriverLaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};
static_assert(sizeof(DriverLaunchConfig) == 56);

// The oldest driver that loads cubins of the CUDA 13 assembler.
constexpr int kMinimumVersion = 13000;
constexpr char kMinimumDriver[] = "580";

struct EntryPoints {
  Result (*Init)(unsigned);
  Result (*DriverGetVersion)(int*);
  Result (*GetErrorName)(Result, const char**);
  Result (*GetErrorString)(Result, const char**);
  Result (*DeviceGet)(DeviceId*, int);
  Result (*DeviceGetName)(char*, int, DeviceId);
  Result (*DeviceGetAttribute)(int*, int, DeviceId);
  Result (*DevicePrimaryCtxRetain)(Context*, DeviceId);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*LibraryLoadData)(Library*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*LibraryGetKernel)(Kernel*, Library, const char*);
  Result (*KernelGetFunction)(Function*, Kernel);
  Result (*FuncSetAttribute)(Function, int, int);
  Result (*FuncLoad)(Function);
  Result (*TensorMapEncodeTiled)(TensorMap*, int type, uint32_t rank, void* address,
                                 const uint64_t* dimensions, const uint64_t* strides,
                                 const uint32_t* box, const uint32_t* element_strides,
                                 int interleave, int swizzle, int l2_promotion, int fill);
  Result (*LaunchKernelEx)(const DriverLaunchConfig*, Function, void** params, void** extra);
};

// Makes a device's primary context, the one that XLA works in, current on this thread.
class ScopedContext {
 public:
  ScopedContext(const EntryPoints& cuda, Context context)
      : cuda_(cuda), result_(cuda.CtxPushCurrent(context)) {}
  ~ScopedContext() {
    Context popped;
    if (result_ == 0) cuda_.CtxPopCurrent(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  Result result() const { return result_; }

 private:
  const EntryPoints& cuda_;
  Result result_;
};

int TensorMapType(ElementType type) {
  switch (type) {
    case ElementType::kBF16:
      return kTensorMapBFloat16;
    case ElementType::kF16:
      return kTensorMapFloat16;
    case ElementType::kF32:
      return kTensorMapFloat32;
    case ElementType::kS32:
      return kTensorMapInt32;
  }
  return -1;
}

// CUtensorMapSwizzle: none, 32, 64, 128 bytes.
int TensorMapSwizzle(int bytes) { return bytes == 0 ? 0 : bytes == 32 ? 1 : bytes == 64 ? 2 : 3; }

class CudaDriverImpl : public Driver {
 public:
  const char* image_extension() const override { return ".cubin"; }

  Status GetDevice(int32_t ordinal, Device* device) override {
    FA4_JAX_RETURN_IF_ERROR(Ready());
    DeviceId id;
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.DeviceGet(&id, ordinal), "cuDeviceGet"));
    char name[256] = {};
    FA4_JAX_RETURN_IF_ERROR(
        Check(cuda_.DeviceGetName(name, sizeof(name) - 1, id), "cuDeviceGetName"));
    int major, minor;
    for (auto [attribute, value] : {std::pair{kComputeCapabilityMajor, &major},
                                    std::pair{kComputeCapabilityMinor, &minor},
                                    std::pair{kMultiprocessorCount, &device->num_sms}}) {
      FA4_JAX_RETURN_IF_ERROR(
          Check(cuda_.DeviceGetAttribute(value, attribute, id), "cuDeviceGetAttribute"));
    }
    device->name = name;
    device->compute_capability = std::to_string(major) + "." + std::to_string(minor);
    // The kernels use what only one architecture has (wgmma, tcgen05), hence the "a".
    device->architecture = "sm_" + std::to_string(major) + std::to_string(minor) + "a";
    return Status();
  }

  Status LoadLibrary(int32_t ordinal, const std::string& image, LibraryHandle* library) override {
    Context context;
    FA4_JAX_RETURN_IF_ERROR(PrimaryContext(ordinal, &context));
    ScopedContext scope(cuda_, context);
    FA4_JAX_RETURN_IF_ERROR(Check(scope.result(), "cuCtxPushCurrent"));
    Library loaded;
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.LibraryLoadData(&loaded, image.data(), nullptr, nullptr, 0,
                                                        nullptr, nullptr, 0),
                                  "cuLibraryLoadData"));
    library->value = loaded;
    return Status();
  }

  Status GetKernel(int32_t ordinal, LibraryHandle library, const KernelRequirements& requirements,
                   KernelHandle* handle) override {
    Context context;
    FA4_JAX_RETURN_IF_ERROR(PrimaryContext(ordinal, &context));
    ScopedContext scope(cuda_, context);
    FA4_JAX_RETURN_IF_ERROR(Check(scope.result(), "cuCtxPushCurrent"));
    Kernel kernel;
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.LibraryGetKernel(&kernel,
                                                         static_cast<Library>(library.value),
                                                         requirements.entry.c_str()),
                                  "cuLibraryGetKernel"));
    // A function belongs to a context, so launching it needs no more than the stream.
    Function function;
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.KernelGetFunction(&function, kernel), "cuKernelGetFunction"));
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.FuncSetAttribute(function, kMaxDynamicSharedSizeBytes,
                                                         static_cast<int>(requirements.shared)),
                                  "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)"));
    if (requirements.cluster > kPortableClusterSize) {
      FA4_JAX_RETURN_IF_ERROR(
          Check(cuda_.FuncSetAttribute(function, kNonPortableClusterSizeAllowed, 1),
                "cuFuncSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)"));
    }
    // Loading is lazy by default; the first launch may be inside a graph capture.
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.FuncLoad(function), "cuFuncLoad"));
    handle->value = function;
    return Status();
  }

  Status EncodeTensorMap(const TensorMapConfig& config, TensorMap* map) override {
    constexpr uint32_t kElementStrides[kMaxTensorMapRank] = {1, 1, 1, 1, 1};
    return Check(cuda_.TensorMapEncodeTiled(
                     map, TensorMapType(config.element_type), static_cast<uint32_t>(config.rank),
                     config.address, config.dimensions, config.strides, config.box,
                     kElementStrides, kInterleaveNone, TensorMapSwizzle(config.swizzle),
                     kL2Promotion128, kFillZero),
                 "cuTensorMapEncodeTiled");
  }

  Status Launch(KernelHandle kernel, const LaunchConfig& config) override {
    LaunchAttribute cluster = {};
    cluster.id = kLaunchAttributeClusterDimension;
    cluster.value.cluster[0] = config.cluster;
    cluster.value.cluster[1] = cluster.value.cluster[2] = 1;
    DriverLaunchConfig launch = {};
    launch.grid[0] = config.grid;
    launch.grid[1] = launch.grid[2] = 1;
    launch.block[0] = config.threads;
    launch.block[1] = launch.block[2] = 1;
    launch.shared_bytes = config.shared;
    launch.stream = static_cast<Stream>(config.stream);
    launch.attributes = &cluster;
    launch.num_attributes = config.cluster > 1 ? 1 : 0;
    return Check(cuda_.LaunchKernelEx(&launch, static_cast<Function>(kernel.value), config.params,
                                      nullptr),
                 "cuLaunchKernelEx");
  }

 private:
  // Finds the entry points; the first answer holds for the life of the process.
  Status Ready() {
    std::call_once(once_, [this] { ready_ = Open(); });
    return ready_;
  }

  Status Open() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return Status::Error("the NVIDIA driver (libcuda.so.1) was not found");
    }
    auto find = [&](const char* name, auto* pointer) {
      *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(
          dlsym(library, name));
      return *pointer != nullptr;
    };
    // First the version: an old driver lacks some of the others.
    int version = 0;
    if (find("cuInit", &cuda_.Init) && find("cuDriverGetVersion", &cuda_.DriverGetVersion) &&
        find("cuGetErrorName", &cuda_.GetErrorName) &&
        find("cuGetErrorString", &cuda_.GetErrorString)) {
      FA4_JAX_RETURN_IF_ERROR(Check(cuda_.Init(0), "cuInit"));
      FA4_JAX_RETURN_IF_ERROR(Check(cuda_.DriverGetVersion(&version), "cuDriverGetVersion"));
    }
    if (version < kMinimumVersion) {
      return Status::Error("these kernels need NVIDIA driver " + std::string(kMinimumDriver) +
                           " or newer (CUDA 13.0); the installed one supports CUDA " +
                           std::to_string(version / 1000) + "." +
                           std::to_string(version % 1000 / 10));
    }
    bool found = find("cuDeviceGet", &cuda_.DeviceGet) &&
                 find("cuDeviceGetName", &cuda_.DeviceGetName) &&
                 find("cuDeviceGetAttribute", &cuda_.DeviceGetAttribute) &&
                 find("cuDevicePrimaryCtxRetain", &cuda_.DevicePrimaryCtxRetain) &&
                 find("cuCtxPushCurrent_v2", &cuda_.CtxPushCurrent) &&
                 find("cuCtxPopCurrent_v2", &cuda_.CtxPopCurrent) &&
                 find("cuLibraryLoadData", &cuda_.LibraryLoadData) &&
                 find("cuLibraryGetKernel", &cuda_.LibraryGetKernel) &&
                 find("cuKernelGetFunction", &cuda_.KernelGetFunction) &&
                 find("cuFuncSetAttribute", &cuda_.FuncSetAttribute) &&
                 find("cuFuncLoad", &cuda_.FuncLoad) &&
                 find("cuTensorMapEncodeTiled", &cuda_.TensorMapEncodeTiled) &&
                 find("cuLaunchKernelEx", &cuda_.LaunchKernelEx);
    return found ? Status() : Status::Error("libcuda.so.1 lacks an entry point of CUDA 13.0");
  }

  Status Check(Result result, const char* call) const {
    if (result == 0) return Status();
    const char* name = nullptr;
    const char* text = nullptr;
    cuda_.GetErrorName(result, &name);
    cuda_.GetErrorString(result, &text);
    return Status::Error(std::string(call) + ": " +
                         (name ? name : "error " + std::to_string(result)) +
                         (text ? std::string(" (") + text + ")" : ""));
  }

  Status PrimaryContext(int32_t ordinal, Context* context) {
    DeviceId id;
    FA4_JAX_RETURN_IF_ERROR(Check(cuda_.DeviceGet(&id, ordinal), "cuDeviceGet"));
    // Never released: it holds loaded kernels until the process ends.
    return Check(cuda_.DevicePrimaryCtxRetain(context, id), "cuDevicePrimaryCtxRetain");
  }

  std::once_flag once_;
  Status ready_;
  EntryPoints cuda_ = {};
};

}  // namespace

Driver& CudaDriver() {
  static auto* driver = new CudaDriverImpl;
  return *driver;
}

}  // namespace fa4_jax
