#include "runtime.h"

#include <mutex>
#include <string>

namespace fa4_jax {
namespace {

namespace ffi = xla::ffi;

struct Runtime {
  std::mutex mutex;
  Bundle bundle;
  // Created with the bundle and never destroyed: XLA may still run while the process ends.
  KernelStore* cuda = nullptr;
  KernelStore* emulated = nullptr;
};

Runtime& GetRuntime() {
  static auto* runtime = new Runtime;
  return *runtime;
}

Status OpenBundle(const std::string& directory) {
  Runtime& runtime = GetRuntime();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  if (runtime.cuda != nullptr) return Status::Error("a bundle is already open");
  FA4_JAX_RETURN_IF_ERROR(Bundle::Open(directory, &runtime.bundle));
  runtime.cuda = new KernelStore(CudaDriver(), runtime.bundle);
  runtime.emulated = new KernelStore(EmulatedDriver(), runtime.bundle);
  return Status();
}

KernelStore* FindStore(Mode mode) {
  Runtime& runtime = GetRuntime();
  std::lock_guard<std::mutex> lock(runtime.mutex);
  return mode == Mode::kLoadAndLaunch ? runtime.emulated : runtime.cuda;
}

ffi::Error ToError(ffi::ErrorCode code, const Status& status) {
  return ffi::Error(code, "fa4_jax: " + status.message());
}

}  // namespace

ffi::Error Run(const Context& context, const Status& checked, Arguments& arguments,
               std::initializer_list<Operation> operations) {
  if (!checked.ok()) return ToError(ffi::ErrorCode::kInvalidArgument, checked);
  KernelStore* store = FindStore(context.mode);
  if (store == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "fa4_jax: no bundle is open; import fa4_jax and call it once first");
  }
  Call& call = arguments.call();
  for (Operation operation : operations) {
    KernelRequest request = MakeRequest(operation, call);
    if (context.mode != Mode::kLaunch) {
      if (Status status = store->Load(context.device, request); !status.ok()) {
        return ToError(ffi::ErrorCode::kFailedPrecondition, status);
      }
    }
    if (context.mode == Mode::kLoad) continue;
    const LoadedKernel* kernel;
    Status status = store->Get(context.device, request, &kernel);
    if (status.ok()) status = Launch(store->driver(), *kernel, call, context.stream);
    if (!status.ok()) return ToError(ffi::ErrorCode::kInternal, status);
  }
  return ffi::Error::Success();
}

}  // namespace fa4_jax

extern "C" const char* Fa4JaxOpenBundle(const char* directory) {
  thread_local std::string message;
  fa4_jax::Status status = fa4_jax::OpenBundle(directory);
  if (status.ok()) return nullptr;
  message = status.message();
  return message.c_str();
}
