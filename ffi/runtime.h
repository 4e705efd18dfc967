// The process-wide state behind the handlers: the bundle that Python opened, and per driver the
// kernels that are loaded from it. Also the stages that all handlers share.

#ifndef FA4_JAX_FFI_RUNTIME_H_
#define FA4_JAX_FFI_RUNTIME_H_

#include <cstdint>
#include <initializer_list>

#include "arguments.h"
#include "bundle.h"
#include "launch.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace fa4_jax {

enum class Platform { kCuda, kEmulated };

// Where and in which stage a handler runs.
struct Context {
  Platform platform = Platform::kCuda;
  // Initialize: loads kernels and launches nothing. Execute: only launches.
  xla::ffi::ExecutionStage stage = xla::ffi::ExecutionStage::kExecute;
  int32_t device = 0;
  void* stream = nullptr;
};

// Runs the operations one after the other on the arguments, in the way of the context's stage.
// `checked` is the status of collecting the arguments.
xla::ffi::Error Run(const Context& context, const Status& checked, Arguments& arguments,
                    std::initializer_list<Operation> operations);

// Defines the exported handlers Fa4Jax<name>{Cuda,Emulated}{Initialize,Execute} over one function
// `impl(const Context&, arguments...)` whose arguments `bind(binding)` declares. The execute stage
// on CUDA may be captured into a graph: it allocates, loads and waits for nothing.
#define FA4_JAX_DEFINE_HANDLERS(name, impl, bind)                                               \
  FA4_JAX_DEFINE_CUDA_HANDLERS_(name, impl, bind)                                               \
  FA4_JAX_DEFINE_EMULATED_HANDLER_(name##EmulatedInitialize, kInitialize, impl, bind)           \
  FA4_JAX_DEFINE_EMULATED_HANDLER_(name##EmulatedExecute, kExecute, impl, bind)

#define FA4_JAX_DEFINE_CUDA_HANDLERS_(name, impl, bind)                                         \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      Fa4Jax##name##CudaInitialize,                                                             \
      ([](int32_t device, auto... arguments) {                                                  \
        return impl({::fa4_jax::Platform::kCuda, ::xla::ffi::ExecutionStage::kInitialize,       \
                     device, nullptr},                                                          \
                    arguments...);                                                              \
      }),                                                                                       \
      bind(::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::kInitialize>()                     \
               .Ctx<::xla::ffi::DeviceOrdinal>()));                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      Fa4Jax##name##CudaExecute,                                                                \
      ([](int32_t device, void* stream, auto... arguments) {                                    \
        return impl({::fa4_jax::Platform::kCuda, ::xla::ffi::ExecutionStage::kExecute, device,  \
                     stream},                                                                   \
                    arguments...);                                                              \
      }),                                                                                       \
      bind(::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::kExecute>()                        \
               .Ctx<::xla::ffi::DeviceOrdinal>()                                                \
               .Ctx<::xla::ffi::PlatformStream<void*>>()),                                      \
      {::xla::ffi::Traits::kCmdBufferCompatible});

#define FA4_JAX_DEFINE_EMULATED_HANDLER_(name, stage_name, impl, bind)                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      Fa4Jax##name,                                                                             \
      ([](auto... arguments) {                                                                  \
        return impl({::fa4_jax::Platform::kEmulated,                                            \
                     ::xla::ffi::ExecutionStage::stage_name, 0, nullptr},                       \
                    arguments...);                                                              \
      }),                                                                                       \
      bind(::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::stage_name>()));

}  // namespace fa4_jax

// Opens the bundle in a directory, once per process, before the first call. Returns null, or what
// is wrong as text that stays valid until the thread's next call.
extern "C" const char* Fa4JaxOpenBundle(const char* directory);

#endif  // FA4_JAX_FFI_RUNTIME_H_
