"""A thin door to the PTX emulator for tests and kernel authors: `Emulator(ptx).launch(...)`.

The library is built from ffi/emulator into build/emulator on first use (a minute), and again when
a source changes. See ffi/emulator/README.md.
"""

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SOURCES = _ROOT / "ffi" / "emulator"
_BUILD = _ROOT / "build" / "emulator"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off")

# CUtensorMapDataType
_DATA_TYPES = {
    "uint8": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
}
_DATA_TYPES |= {"float32": 7, "float64": 8, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class EmulatorError(RuntimeError):
    """What the emulator reports: a malformed module, a wrong access, a deadlock, a race."""


@dataclass(frozen=True)
class TensorMap:
    """A dense array seen by the tensor memory accelerator.

    box: elements, innermost dimension first, one for each dimension of `array`. swizzle: bytes of
    a row, 0, 32, 64 or 128. Elements outside the array read as zero.
    """

    array: np.ndarray
    box: Sequence[int]
    swizzle: int = 0

    def encode(self, library: ctypes.CDLL) -> bytes:
        """The 128 bytes of the descriptor."""
        array = self.array
        rank = array.ndim
        if len(self.box) != rank:
            raise ValueError(f"box {self.box} of an array of {rank} dimensions")
        name = array.dtype.name
        data_type = _DATA_TYPES.get(name, 0 if array.itemsize == 1 else None)
        if data_type is None:
            raise ValueError(f"no tensor map type for {name}")
        sizes = (ctypes.c_uint64 * rank)(*reversed(array.shape))
        strides = (ctypes.c_uint64 * rank)(*list(reversed(array.strides))[1:], 0)
        box = (ctypes.c_uint32 * rank)(*self.box)
        steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        out = ctypes.create_string_buffer(128)
        address = ctypes.c_uint64(array.ctypes.data)
        status = library.emulator_encode_tiled(
            out,
            data_type,
            rank,
            address,
            sizes,
            strides,
            box,
            steps,
            0,
            _SWIZZLES[self.swizzle],
            2,
            0,
        )
        if status:
            raise ValueError(f"tensor map: {library.emulator_error().decode()}")
        return out.raw


@dataclass(frozen=True)
class Result:
    """What a launch took: warp instructions, seconds; with `trace` the JSON text of trace.cc."""

    instructions: int
    seconds: float
    trace: str


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("writable", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(_Region)),
        ("num_regions", ctypes.c_size_t),
        ("seed", ctypes.c_uint64),
        ("host_threads", ctypes.c_int32),
        ("check_races", ctypes.c_int32),
        ("strict_exit", ctypes.c_int32),
        ("trace", ctypes.c_int32),
        ("instruction_limit", ctypes.c_uint64),
        ("num_sms", ctypes.c_int32),
        ("registers", ctypes.c_uint32),
        ("lenient_tensor", ctypes.c_int32),
    )


def build_library(
    name: str = "emulator", extra_sources: Sequence[pathlib.Path] = ()
) -> pathlib.Path:
    """Compiles the emulator, and `extra_sources` that use its headers, into a shared library."""
    sources = [*sorted(_SOURCES.glob("*.cc")), *extra_sources]
    headers = sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.inc")])
    common = hashlib.sha256(
        b"".join(path.read_bytes() for path in headers) + repr(_FLAGS).encode()
    ).hexdigest()
    _BUILD.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler")

    def compile_one(source: pathlib.Path) -> pathlib.Path:
        digest = hashlib.sha256(common.encode() + source.read_bytes()).hexdigest()[:16]
        target = _BUILD / f"{source.stem}-{digest}.o"
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.o")
            command = [compiler, *_FLAGS, f"-I{_SOURCES}", "-c", str(source), "-o", str(partial)]
            subprocess.run(command, check=True)
            partial.rename(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    digest = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:16]
    library = _BUILD / f"lib{name}-{digest}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}.so")
        subprocess.run(
            [compiler, "-shared", *map(str, objects), "-o", str(partial), "-lpthread"], check=True
        )
        partial.rename(library)
    return library


_library: ctypes.CDLL | None = None


def load_library() -> ctypes.CDLL:
    """The emulator, built on first use."""
    global _library
    if _library is None:
        library = ctypes.CDLL(os.environ.get("FA4_JAX_EMULATOR_LIBRARY") or str(build_library()))
        library.emulator_load.restype = ctypes.c_void_p
        for name in ("emulator_error", "emulator_trace", "emulator_entries"):
            getattr(library, name).restype = ctypes.c_char_p
        library.emulator_parameter_size.restype = ctypes.c_uint32
        for name in ("unload", "entries", "parameter_count", "parameter_size", "launch"):
            getattr(library, f"emulator_{name}").argtypes = [ctypes.c_void_p] + {
                "unload": [],
                "entries": [],
                "parameter_count": [ctypes.c_char_p],
                "parameter_size": [ctypes.c_char_p, ctypes.c_int32],
                "launch": [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p],
            }[name]
        _library = library
    return _library


def _triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return (*values, 1, 1)[:3]


class Emulator:
    """A PTX module. `entries` are its kernels."""

    def __init__(self, ptx: str | bytes):
        self._library = load_library()
        text = ptx.encode() if isinstance(ptx, str) else ptx
        self._module = self._library.emulator_load(text, ctypes.c_size_t(len(text)))
        if not self._module:
            raise EmulatorError(self._library.emulator_error().decode())
        self.entries = self._library.emulator_entries(self._module).decode().split()

    def parameter_sizes(self, entry: str) -> list[int]:
        """Bytes of each parameter of a kernel."""
        name = entry.encode()
        count = self._library.emulator_parameter_count(self._module, name)
        if count < 0:
            raise EmulatorError(self._library.emulator_error().decode())
        return [self._library.emulator_parameter_size(self._module, name, i) for i in range(count)]

    def __del__(self):
        if getattr(self, "_module", None):
            self._library.emulator_unload(self._module)

    def launch(
        self,
        entry: str | None,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        params: Sequence[object] = (),
        *,
        cluster: int | Sequence[int] = 1,
        shared: int = 0,
        seed: int = 0,
        races: bool = False,
        threads: int = 0,
        strict_exit: bool = True,
        trace: bool = False,
        instruction_limit: int = 0,
        num_sms: int = 132,
        registers: int = 0,
        lenient_tensor: bool = False,
        buffers: Sequence[np.ndarray] = (),
        check_global: bool = True,
    ) -> Result:
        """Runs a grid to its end; raises EmulatorError with the place of the first error.

        params: one for each kernel parameter: an array (its address), a TensorMap, an int, a float,
        bytes, or None (a null pointer). Kernels may touch only arrays named here, in tensor maps or
        in `buffers`, unless check_global is off. entry: None if the module has one. shared: bytes
        of dynamic shared memory. seed: 0 for the deterministic schedule, else an adversarial one.
        races: report conflicting accesses that nothing orders. lenient_tensor: tcgen05 loads need
        no wait, and hand-overs of tensor memory between threads no tcgen05.fence (kernels of
        others rely on that). strict_exit: a CTA may not end before its bulk copies are read.
        """
        if entry is None:
            (entry,) = self.entries
        name = entry.encode()
        sizes = self.parameter_sizes(entry)
        count = len(sizes)
        if count != len(params):
            raise ValueError(f"{entry} has {count} parameters, not {len(params)}")
        arrays = list(buffers)
        storage = []
        for i, (param, size) in enumerate(zip(params, sizes, strict=True)):
            if isinstance(param, TensorMap):
                arrays.append(param.array)
                raw = param.encode(self._library)
            elif isinstance(param, np.ndarray):
                arrays.append(param)
                raw = int(param.ctypes.data).to_bytes(8, "little")
            elif param is None:
                raw = bytes(8)
            elif isinstance(param, bytes):
                raw = param
            elif isinstance(param, float):
                raw = np.array(param, np.float32 if size == 4 else np.float64).tobytes()
            else:
                raw = (int(param) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
            if len(raw) != size:
                raise ValueError(f"parameter {i} has {size} bytes, not {len(raw)}")
            storage.append(ctypes.create_string_buffer(raw, size))
        pointers = (ctypes.c_void_p * max(count, 1))(
            *[ctypes.addressof(buffer) for buffer in storage]
        )
        unique = (
            {array.ctypes.data: array for array in arrays if array.nbytes} if check_global else {}
        )
        regions = (_Region * max(len(unique), 1))()
        for region, (i, array) in zip(regions, enumerate(unique.values()), strict=False):
            region.name = f"array {i} {array.dtype}{list(array.shape)}".encode()
            region.base, region.bytes = array.ctypes.data, array.nbytes
            region.writable = array.flags.writeable
        request = _Launch(
            grid=_triple(grid),
            cluster=_triple(cluster),
            block=_triple(block),
            dynamic_shared=shared,
            parameters=pointers,
            regions=regions,
            num_regions=len(unique),
            seed=seed,
            host_threads=threads,
            check_races=races,
            strict_exit=strict_exit,
            trace=trace,
            instruction_limit=instruction_limit,
            num_sms=num_sms,
            registers=registers,
            lenient_tensor=lenient_tensor,
        )
        instructions, seconds = ctypes.c_uint64(), ctypes.c_double()
        status = self._library.emulator_launch(
            self._module,
            name,
            ctypes.addressof(request),
            ctypes.addressof(instructions),
            ctypes.addressof(seconds),
        )
        if status:
            raise EmulatorError(self._library.emulator_error().decode())
        text = self._library.emulator_trace().decode() if trace else ""
        return Result(instructions.value, seconds.value, text)


def _grid(expression: str, symbols: dict[str, int]) -> int:
    """Evaluates `T/128*N*B limit num_sms*1` of the manifest; / is a ceiling division."""

    def product(text: str) -> int:
        total = 1
        for factor in text.split("*"):
            name, *divisors = factor.split("/")
            value = symbols[name] if name in symbols else int(name)
            for divisor in divisors:
                value = -(-value // int(divisor))
            total *= value
        return total

    work, _, limit = expression.partition(" limit ")
    return min(product(work), product(limit)) if limit else product(work)


def launch_kernel(
    directory: str | pathlib.Path,
    kernel: str,
    operands: dict[str, np.ndarray | None],
    symbols: dict[str, int],
    num_sms: int = 132,
    **options,
) -> Result:
    """Runs a kernel of a bundle directory (NAME.ptx and its manifest block) as ffi/launch.cc would.

    operands: arrays by the names of the manifest, None for absent optional ones. symbols: T, S, N
    ... and the attributes that the kernel takes. options: those of Emulator.launch.
    """
    directory = pathlib.Path(directory)
    block = None
    for path in [directory / f"{kernel}.manifest", directory.parent / "manifest.txt"]:
        if path.exists():
            for candidate in path.read_text().split("\n\n"):
                if f"kernel {kernel}" in candidate.splitlines():
                    block = candidate
    if block is None:
        raise ValueError(f"no manifest of {kernel} in {directory}")
    fields: dict[str, str] = {}
    params: list[object] = []
    symbols = {**symbols, "num_sms": num_sms}
    for line in block.strip().splitlines():
        key, _, rest = line.partition(" ")
        if key != "param":
            fields[key] = rest
            continue
        kind, name, *more = rest.split()
        if kind == "tensor_map":
            array = operands[name]
            if array is None:
                raise ValueError(f"operand {name} is absent")
            split = more.index("swizzle")
            box = [int(n) for n in more[1:split]]
            if more[-1] == "packed":
                box[1], box[2] = box[1] * symbols["pack"], box[2] // symbols["pack"]
            params.append(TensorMap(array, box, int(more[split + 1])))
        elif kind == "pointer":
            params.append(operands[name])
        elif kind == "f32":
            params.append(float(symbols[name]))
        else:
            params.append(int(symbols[name]))
    return Emulator((directory / f"{kernel}.ptx").read_text()).launch(
        fields["entry"],
        _grid(fields["grid"], symbols),
        int(fields["threads"]),
        params,
        cluster=[int(n) for n in fields["cluster"].split()],
        shared=int(fields["shared"]),
        num_sms=num_sms,
        registers=int(fields["registers"]),
        **options,
    )
