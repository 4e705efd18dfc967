/* The driver functions that host code compiled by CuTe-DSL calls, for a machine without a GPU.
 *
 * Each compiled function is linked with this file. A launch goes to the callback, which runs the kernel on the emulator;
 * everything else succeeds. Names and arguments are those of the CUDA runtime API, with an underscore in front.
 */
#include <string.h>

typedef int (*LaunchCallback)(int function, const char* kernel, const void* config, void** parameters);

enum { kSuccess = 0, kMaxSharedPerBlockOptin = 97, kMajor = 75, kMinor = 76, kLarge = 1 << 20 };

static LaunchCallback launch_callback;
static int function_number, compute_major, compute_minor;

void peers_set_device(LaunchCallback callback, int function, int major, int minor) {
  launch_callback = callback;
  function_number = function;
  compute_major = major;
  compute_minor = minor;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}

int _cudaSetDevice(int device) {
  (void)device;
  return kSuccess;
}

int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case kMaxSharedPerBlockOptin: *value = 232448; break;
    case kMajor: *value = compute_major; break;
    case kMinor: *value = compute_minor; break;
    default: *value = kLarge;  /* a limit that no kernel reaches */
  }
  return kSuccess;
}

/* A library is no object here, and a kernel is its name. */
int _cudaLibraryLoadData(void** library, const void* code, ...) {
  *library = (void*)code;
  return kSuccess;
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library;
  *kernel = strdup(name);
  return *kernel ? kSuccess : 2;
}

int _cudaFuncSetAttribute(void* kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return kSuccess;
}

int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return kSuccess;
}

int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 0;  /* asked for the static shared memory, which these kernels do without */
  return kSuccess;
}

int _cudaLaunchKernelEx(const void* config, void* kernel, void** parameters) {
  return launch_callback(function_number, kernel, config, parameters);
}

/* Called before each call of the function: `load` finds the kernels once `init` has filled the library. */
int cuda_dialect_init_library_once(void** library, int (*init)(void**), int (*load)(void**, int), void* set_error) {
  (void)set_error;
  if (*library) return kSuccess;
  int status = init(library);
  return status ? status : load(library, 0);
}

void cuda_dialect_unload_library_once(void** library) { (void)library; }
