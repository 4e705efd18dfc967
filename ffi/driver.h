// The few driver entry points that the launcher needs, behind one interface with two
// implementations: libcuda (cuda_driver.cc) and the PTX emulator (emulated_driver.cc). Nothing
// above this interface knows which of them runs.
//
// Calls come in two phases, as XLA's FFI stages do. GetDevice, LoadLibrary and GetKernel are called
// from `initialize`, under a lock; EncodeTensorMap and Launch from `execute`, by many threads at
// once and possibly while a CUDA graph is captured, so they must not allocate device memory, load
// code or synchronise with the device.

#ifndef FA4_JAX_FFI_DRIVER_H_
#define FA4_JAX_FFI_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace fa4_jax {

struct Device {
  std::string name;  // as a person knows it, e.g. "NVIDIA H200"
  // What cubins must be assembled for, e.g. "sm_90a". Empty: the driver runs every architecture
  // and the first one of the bundle is as good as any (the emulator without FA4_JAX_EMULATED_ARCH).
  std::string architecture;
  std::string compute_capability;  // "9.0", for messages
  int num_sms = 0;
};

// Opaque handles; a null handle is never valid.
struct LibraryHandle {
  void* value = nullptr;
};
struct KernelHandle {
  void* value = nullptr;
};

// What a kernel needs set before its first launch.
struct KernelRequirements {
  std::string name;   // in the bundle, for messages
  std::string entry;  // in the image
  uint32_t threads = 0;
  uint32_t cluster = 1;  // CTAs of a cluster, along x
  uint32_t shared = 0;   // dynamic shared memory, bytes
};

enum class ElementType { kBF16, kF16, kF32, kS32 };

// The 128-byte descriptor of the tensor memory accelerator (CUtensorMap of the driver API).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

constexpr int kMaxTensorMapRank = 5;

// A dense row-major array, dimensions listed innermost first. Tiled mode, element strides 1, no
// interleave, L2 promotion 128 bytes, out-of-bounds elements read as zero.
struct TensorMapConfig {
  ElementType element_type = ElementType::kBF16;
  void* address = nullptr;
  int rank = 0;
  uint64_t dimensions[kMaxTensorMapRank] = {};
  uint64_t strides[kMaxTensorMapRank] = {};  // bytes; [i] belongs to dimension i + 1
  uint32_t box[kMaxTensorMapRank] = {};
  int swizzle = 0;  // bytes: 0, 32, 64, 128
};

// An array of the call. The emulator lets a kernel touch global memory inside these alone.
struct BufferRange {
  const char* name = nullptr;  // of the operand
  void* address = nullptr;     // null when the optional operand is absent
  size_t bytes = 0;
  bool writable = false;  // results; operands are read-only
};

struct LaunchConfig {
  uint32_t grid = 0;  // CTAs along x, a multiple of `cluster`
  uint32_t threads = 0;
  uint32_t cluster = 1;
  uint32_t shared = 0;
  void* stream = nullptr;  // CUstream; null on the emulator, which returns when the grid is done
  // One pointer per kernel parameter, to a TensorMap, a void*, an int32_t or a float.
  void** params = nullptr;
  const BufferRange* buffers = nullptr;
  size_t num_buffers = 0;
};

class Driver {
 public:
  virtual ~Driver() = default;

  // Which file of the bundle LoadLibrary wants: ".cubin" or ".ptx".
  virtual const char* image_extension() const = 0;

  // Fails when the driver cannot be used at all (not found, too old) or has no such device.
  virtual Status GetDevice(int32_t ordinal, Device* device) = 0;

  // `image` is the whole file. The library stays loaded until the process ends.
  virtual Status LoadLibrary(int32_t ordinal, const std::string& image, LibraryHandle* library) = 0;

  // Finds the entry and makes it ready to launch on the device: after this, Launch loads nothing.
  virtual Status GetKernel(int32_t ordinal, LibraryHandle library,
                           const KernelRequirements& requirements, KernelHandle* kernel) = 0;

  virtual Status EncodeTensorMap(const TensorMapConfig& config, TensorMap* map) = 0;

  // Reads every parameter before it returns. An error's text names the failing driver call.
  virtual Status Launch(KernelHandle kernel, const LaunchConfig& config) = 0;
};

// One instance each for the life of the process; cheap to call, loads nothing by itself.
Driver& CudaDriver();      // cuda_driver.cc
Driver& EmulatedDriver();  // emulated_driver.cc

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_DRIVER_H_
