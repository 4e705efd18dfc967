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

// What a handler does, by its platform and stage.
enum class Mode {
  kLoad,           // CUDA, initialize: makes kernels ready and launches nothing
  kLaunch,         // CUDA, execute: only launches
  kLoadAndLaunch,  // the emulator, execute: XLA's CPU client runs no initialize stage
};

struct Context {
  Mode mode = Mode::kLaunch;
  int32_t device = 0;
  void* stream = nullptr;
};

// Runs the operations one after the other on the arguments, in the context's mode.
// `checked` is the status of collecting the arguments.
xla::ffi::Error Run(const Context& context, const Status& checked, Arguments& arguments,
                    std::initializer_list<Operation> operations);

// Defines the exported handlers Fa4Jax<name>CudaInitialize, ...CudaExecute and ...EmulatedExecute
// over one function `impl(const Context&, arguments...)` whose arguments `bind(binding)` declares.
// The execute stage on CUDA may be captured into a graph: it allocates, loads, waits for nothing.
#define FA4_JAX_DEFINE_HANDLERS(name, impl, bind)                                              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                               \
      Fa4Jax##name##CudaInitialize,                                                            \
      ([](int32_t device, auto... arguments) {                                                 \
        return impl({::fa4_jax::Mode::kLoad, device, nullptr}, arguments...);                  \
      }),                                                                                      \
      bind(::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::kInitialize>()                    \
               .Ctx<::xla::ffi::DeviceOrdinal>()));                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                               \
      Fa4Jax##name##CudaExecute,                                                               \
      ([](int32_t device, void* stream, auto... arguments) {                                   \
        return impl({::fa4_jax::Mode::kLaunch, device, stream}, arguments...);                 \
      }),                                                                                      \
      bind(::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::kExecute>()                       \
               .Ctx<::xla::ffi::DeviceOrdinal>()                                               \
               .Ctx<::xla::ffi::PlatformStream<void*>>()),                                     \
      {::xla::ffi::Traits::kCmdBufferCompatible});                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                               \
      Fa4Jax##name##EmulatedExecute,                                                           \
      ([](auto... arguments) {                                                                 \
        return impl({::fa4_jax::Mode::kLoadAndLaunch, 0, nullptr}, arguments...);              \
      }),                                                                                      \
      bind(::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::kExecute>()))

}  // namespace fa4_jax

// Opens the bundle in a directory, once per process, before the first call. Returns null, or what
// is wrong as text that stays valid until the thread's next call.
extern "C" const char* Fa4JaxOpenBundle(const char* directory);

#endif  // FA4_JAX_FFI_RUNTIME_H_
