// Loading and launching, for any kernel that the manifest can describe and on either driver.

#ifndef FA4_JAX_FFI_LAUNCH_H_
#define FA4_JAX_FFI_LAUNCH_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "bundle.h"
#include "driver.h"
#include "operands.h"
#include "status.h"

namespace fa4_jax {

struct LoadedKernel {
  const KernelRecord* record = nullptr;
  KernelHandle handle;
  int num_sms = 0;  // of the device that it is loaded on
};

// The kernels of one bundle that are loaded, per device of one driver. Thread-safe. What is loaded
// stays so until the process ends, and pointers into the store stay valid.
class KernelStore {
 public:
  KernelStore(Driver& driver, const Bundle& bundle) : driver_(driver), bundle_(bundle) {}

  // Makes the kernel for `request` ready on the device: for the initialize stage. Does nothing the
  // second time.
  Status Load(int32_t device, const KernelRequest& request);

  // The kernel that Load made ready: for the execute stage.
  Status Get(int32_t device, const KernelRequest& request, const LoadedKernel** kernel);

  Driver& driver() { return driver_; }

 private:
  Status LoadLocked(int32_t device, const KernelRequest& request, const LoadedKernel** kernel);

  struct DeviceState {
    Device description;
    std::string architecture;
    std::map<const KernelRecord*, LoadedKernel> kernels;
  };

  Driver& driver_;
  const Bundle& bundle_;
  std::mutex mutex_;
  std::map<int32_t, DeviceState> devices_;
  std::map<std::pair<int32_t, KernelRequest>, const LoadedKernel*> requests_;
};

// The number of CTAs along x. Fails when it is not within 1..2^31-1 or not whole clusters.
Status GridSize(const KernelRecord& kernel, const Call& call, uint32_t* grid);

// Fills the kernel's parameters from the call and launches it. `call[Symbol::kNumSms]` need not be
// set. Touches the device in no other way.
Status Launch(Driver& driver, const LoadedKernel& kernel, Call& call, void* stream);

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_LAUNCH_H_
