"""Runs what CuTe-DSL compiles, host code included, without a GPU: launches go to the emulator.

For foreign programs that expect a GPU. `Device` puts itself between them and the driver:

- tensors of the CPU pass for CUDA tensors, so the host code gets their addresses;
- each compiled function is exported as an object file and linked with driver.c, whose launch
  function calls back here with the kernel's name, the launch configuration and the parameters;
- the PTX kept from the compilation runs on the emulator with these.

Nothing of the program changes: its grids, clusters, tensor maps, parameters and PTX are its own.
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from emulator import Emulator

_DRIVER = pathlib.Path(__file__).resolve().parent / "driver.c"
_CUDA_DEVICE = 2  # kDLCUDA of DLPack
_CLUSTER_ATTRIBUTE = 4  # cudaLaunchAttributeClusterDimension


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("value", ctypes.c_uint32 * 16),
    )


class _Configuration(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_Configuration),
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclass(frozen=True)
class Launch:
    """A kernel launch that the emulator has carried out."""

    kernel: str
    grid: list[int]
    block: list[int]
    cluster: list[int]
    shared: int
    parameter_bytes: list[int]
    instructions: int
    seconds: float


class CudaTensor:
    """A torch tensor on the CPU that says through DLPack that it is on the first GPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA_DEVICE, 0

    def __dlpack__(self, **_):
        capsule = self.tensor.detach().__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype = ctypes.c_void_p
        pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        # DLTensor: the data pointer, then the device's type.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = _CUDA_DEVICE
        return capsule


def set_environment(architecture: str, num_sms: int) -> None:
    """What CuTe-DSL and FlashAttention-4 read at import: the GPU to compile for, as `sm_100a`."""
    os.environ["CUTE_DSL_ARCH"] = architecture
    os.environ["FLASH_ATTENTION_ARCH"] = architecture
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(num_sms)


class Device:
    """A pretended GPU. `options` are those of Emulator.launch, `launches` the log."""

    def __init__(self, architecture: str, num_sms: int, directory: str | pathlib.Path):
        """architecture: as for set_environment. directory: for PTX, objects and libraries."""
        self.options: dict[str, object] = {}
        self.launches: list[Launch] = []
        self._num_sms = num_sms
        self._version = divmod(int(architecture[3:].rstrip("af")), 10)
        self._directory = pathlib.Path(directory)
        # By compiled function: two instances of one kernel class give their kernels one name.
        self._modules: list[Emulator] = []
        self._buffers: list[np.ndarray] = []
        self._error: Exception | None = None
        self._callback = _Callback(self._launch)
        self._driver = self._directory / "driver.o"
        command = ["cc", "-c", "-fPIC", "-O1", str(_DRIVER), "-o", str(self._driver)]
        subprocess.run(command, check=True)

    def install(self) -> None:
        """Patches torch and CuTe-DSL; a program that takes names from them is imported after it."""
        import cutlass
        import torch
        from cutlass import cute
        from cutlass.cute import runtime

        # A torch.Tensor on the CPU passes `is_cuda` and is labelled on its way through DLPack.
        torch.Tensor.is_cuda = property(lambda _: True)
        from_dlpack = runtime.from_dlpack
        runtime.from_dlpack = lambda tensor, **options: from_dlpack(CudaTensor(tensor), **options)

        hardware = cutlass.utils.HardwareInfo
        hardware.__init__ = lambda *_: None
        hardware.get_device_multiprocessor_count = lambda _: self._num_sms
        hardware.get_max_active_clusters = lambda _, size, *__: max(self._num_sms // size, 1)

        compile_function = cute.compile

        def compile_and_link(*args, options: str = "", **keywords):
            keep = f"{options} --keep-ptx --dump-dir={self._directory}"
            return self.link(compile_function(*args, options=keep, **keywords))

        cute.compile = compile_and_link

    def link(self, compiled) -> Callable[..., None]:
        """The compiled function (with --enable-tvm-ffi and --keep-ptx) as one that runs here.

        It takes torch tensors for tensors, and NumPy arrays for pointers.
        """
        import tvm_ffi

        number = len(self._modules)
        base = self._directory / f"function{number}"
        base.with_suffix(".ptx").write_text(compiled.artifacts.PTX)
        compiled.export_to_c(str(base.with_suffix(".o")), "entry")
        # -Bsymbolic: driver.c comes before the real driver functions, which may be loaded already.
        command = ["cc", "-shared", "-Wl,-Bsymbolic", str(base.with_suffix(".o"))]
        library = base.with_suffix(".so")
        subprocess.run([*command, str(self._driver), "-o", str(library)], check=True)
        ctypes.CDLL(str(library)).peers_set_device(self._callback, number, *self._version)
        entry = tvm_ffi.load_module(str(library))["entry"]
        self._modules.append(Emulator(compiled.artifacts.PTX))

        def call(*args) -> None:
            self._buffers = []
            try:
                entry(*[self._convert(arg) for arg in args])
            except Exception as error:
                failure, self._error = self._error, None
                raise failure or error from None

        return call

    def _convert(self, value):
        """Labels tensors, makes arrays addresses, and notes the memory that kernels may touch."""
        import torch

        if isinstance(value, np.ndarray):
            self._buffers.append(value)
            return value.ctypes.data
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size:
                memory = (ctypes.c_uint8 * size).from_address(address)
                self._buffers.append(np.ctypeslib.as_array(memory))
            return CudaTensor(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self._convert(item) for item in value])
        if isinstance(value, tuple | list):
            return type(value)(self._convert(item) for item in value)
        return value

    def _launch(self, function: int, kernel: bytes, configuration, parameters) -> int:
        # An exception cannot cross the foreign frames: it waits in _error.
        try:
            self._run(self._modules[function], kernel.decode(), configuration[0], parameters)
        except Exception as error:
            self._error = error
            return 1
        return 0

    def _run(
        self, module: Emulator, kernel: str, configuration: _Configuration, parameters
    ) -> None:
        cluster = [1, 1, 1]
        for i in range(configuration.num_attributes):
            if configuration.attributes[i].id == _CLUSTER_ATTRIBUTE:
                cluster = list(configuration.attributes[i].value[:3])
        sizes = module.parameter_sizes(kernel)
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
        grid, block = list(configuration.grid), list(configuration.block)
        begin = time.perf_counter()
        result = module.launch(
            kernel,
            grid,
            block,
            values,
            cluster=cluster,
            shared=configuration.shared,
            num_sms=self._num_sms,
            buffers=self._buffers,
            **self.options,
        )
        seconds = time.perf_counter() - begin
        self.launches.append(
            Launch(
                kernel,
                grid,
                block,
                cluster,
                configuration.shared,
                sizes,
                result.instructions,
                seconds,
            )
        )


def serve(answer: Callable[[dict], dict]) -> None:
    """Answers the requests of standard input, each a line of JSON.

    What programs print goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
