"""What a kernel's parameters are and how the launcher fills them.

A kernel states here, once, everything that the C++ launcher has to know about it. The build writes
the statement into the bundle's manifest and also *traces the kernel with it*, so the parameter
list of the compiled code and that of the launcher come from the same lines.

Protocol between a kernel module and ``kernels/build.py``:

* Every module under ``kernels/sm*/`` that defines ``variants()`` takes part in the build;
  ``variants()`` returns the list of kernel instances (see :class:`Kernel`) of that module.
* An instance has ``declaration() -> KernelSpec`` and ``kernel``, a ``@cute.kernel`` method whose
  arguments (after ``self``) are ``declaration().params`` in the same order, typed

  =================  ==================================================================
  :class:`TensorMap`  ``cutlass.GridConstant[cuda.TensorMap]`` (carries box, swizzle, dtype)
  :class:`Pointer`    ``cute.Pointer`` to global memory, element type of the operand
  :class:`S32`        ``cutlass.Int32``
  :class:`F32`        ``cutlass.Float32``
  =================  ==================================================================

* The kernel needs no host function: the build makes one, which launches ``kernel`` with
  ``threads`` and ``cluster`` of its declaration (so the assembler knows the register limit).
  The grid is one-dimensional: ``blockIdx.x`` alone numbers the work.
* Modules import each other relatively (``from .. import abi``): the package is called ``kernels``
  in the source tree and ``fa4_jax.kernels`` when installed.

::

    class Forward:
        def declaration(self) -> abi.KernelSpec:
            return abi.KernelSpec(
                name="sm90_forward_bf16_h128_causal",
                architecture="sm_90a",
                operation="forward",
                select={"dtype": "bf16", "head_dim": 128, "mask": "causal", "logits": "plain"},
                threads=384,
                grid=("T/128", "N", "B"),
                params=(
                    abi.TensorMap("query", box=(64, 1, 128, 1), swizzle=128),
                    abi.Pointer("lse"),
                    abi.S32("T"),
                    abi.F32("logits_soft_cap"),
                ),
            )

        @cute.kernel
        def kernel(self, query: cutlass.GridConstant[cuda.TensorMap], lse: cute.Pointer,
                   length: cutlass.Int32, logits_soft_cap: cutlass.Float32): ...

This module needs no DSL; the manifest format is described at :meth:`KernelSpec.to_manifest`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# Opt-in dynamic shared memory of one CTA: 228 KiB of an SM less 1 KiB that the system reserves.
# The same on compute capability 9.0, 10.0 and 10.3 (CUDA C++ Programming Guide, technical
# specifications per compute capability).
SHARED_LIMIT = 227 * 1024

# Dimensions and integer attributes that a handler offers to grids and 32-bit integer parameters.
# Tp is T rounded up to 128, Hp is H rounded up to 64 (the padded scratch shapes). pack is the
# largest power of two that divides N/K with T * pack <= PACKED_ROWS, or 1; packed_T = T * pack and
# packed_N = N / pack (see TensorMap.packed). row_blocks is the number of blocks of SEGMENT_ROWS
# rows, T's in the forward and S's in the backward.
SYMBOLS = (
    *("B", "T", "S", "N", "K", "H", "Hv", "Tp", "Hp", "pack", "packed_T", "packed_N"),
    *("row_blocks", "window_left", "window_right", "num_sms"),
)

# Rows of the query tile that heads are packed into.
PACKED_ROWS = 128

# Attributes that are float32. logits_soft_cap is 0 where the call has none.
F32_SYMBOLS = ("logits_soft_cap",)

# segment_bounds has four numbers (begin, end, clear_begin, clear_end) per block of so many rows.
# Rows are queries and columns keys in the forward, the reverse in the backward. Columns outside
# [begin, end) share no segment with any row of the block, those in [clear_begin, clear_end) share
# it with every row; an empty range has end <= begin. Lengths and windows are not counted.
SEGMENT_ROWS = 64

# operation -> operand -> (dimensions, element type); "data" is the type that `select dtype` names.
_COMMON = {
    "query": ("B T N H", "data"),
    "key": ("B S K H", "data"),
    "value": ("B S K Hv", "data"),
    "scale": ("B", "f32"),
    "query_seq_lengths": ("B", "s32"),
    "key_value_seq_lengths": ("B", "s32"),
    "query_offset": ("B", "s32"),
    "query_segment_ids": ("B T", "s32"),
    "key_value_segment_ids": ("B S", "s32"),
    "segment_bounds": ("B row_blocks 4", "s32"),
    "out": ("B T N Hv", "data"),
    "lse": ("B T N", "f32"),
}
_FORWARD = _COMMON | {"sinks": ("B N", "f32")}
_BACKWARD = _COMMON | {
    "dout": ("B T N Hv", "data"),
    "dlse": ("B T N", "f32"),
    "dq": ("B T N H", "data"),
    "dk": ("B S K H", "data"),
    "dv": ("B S K Hv", "data"),
    "dq_accumulator": ("B N Tp Hp", "f32"),
    "lse_log2": ("B N Tp", "f32"),
    "delta": ("B N Tp", "f32"),
}
OPERANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "forward": _FORWARD,
    "backward_preprocess": _BACKWARD,
    "backward": _BACKWARD,
    "backward_postprocess": _BACKWARD,
}
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4}


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A 128-byte tensor map (TMA descriptor) over one operand, passed by value.

    The map spans the operand's dense row-major array with its dimensions reversed, so query
    ``[B, T, N, H]`` has coordinates ``(h, n, t, b)``; elements out of bounds are filled with zero.

    Attributes:
      operand: name of the operand, see ``OPERANDS``.
      box: extent of one copy per dimension, innermost first; as many entries as the operand has.
      swizzle: 0, 32, 64 or 128 bytes; ``box[0]`` must fit the swizzle span.
      packed: of an operand ``[B, T, N, .]``: at launch ``box[1]`` (heads) is multiplied and
        ``box[2]`` (positions) divided by the symbol ``pack``, so that where T is short one box
        holds several heads of one kv head. Row r of a box ``(columns, 1, rows, 1)`` is then
        position ``r // pack`` of head ``r % pack``, counted from the coordinates of the copy.
    """

    operand: str
    box: tuple[int, ...]
    swizzle: int = 0
    packed: bool = False


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The device address of an operand; null for an optional operand that the call leaves out."""

    operand: str


@dataclasses.dataclass(frozen=True)
class S32:
    """A 32-bit signed integer: a dimension or an attribute, see ``SYMBOLS``."""

    symbol: str


@dataclasses.dataclass(frozen=True)
class F32:
    """A float32 attribute, see ``F32_SYMBOLS``."""

    symbol: str


Parameter = TensorMap | Pointer | S32 | F32

PROBLEM: tuple[Parameter, ...] = (
    Pointer("scale"),
    Pointer("query_seq_lengths"),
    Pointer("key_value_seq_lengths"),
    Pointer("query_offset"),
    Pointer("query_segment_ids"),
    Pointer("key_value_segment_ids"),
    Pointer("segment_bounds"),
    S32("B"),
    S32("T"),
    S32("S"),
    S32("N"),
    S32("K"),
    S32("window_left"),
    S32("window_right"),
    F32("logits_soft_cap"),
)
"""The last parameters of every attention kernel: what is to be computed, whatever its tiles are.

All variants declare all of them; one that a variant does not read costs nothing.
"""


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Everything the launcher knows about one compiled kernel, except what the build measures.

    Attributes:
      name: unique in the bundle, lower case, e.g. ``sm90_forward_bf16_h128_causal``.
      architecture: target of the assembler, e.g. ``sm_90a``.
      operation: a key of ``OPERANDS``.
      select: what a call must ask for to get this kernel. A key that is absent does not matter to
        the kernel, which comes after those that name the call's mask. Keys: ``dtype`` (bf16,
        f16), ``head_dim`` (largest H and Hv served), ``mask`` (full, causal, window, segments; a
        window kernel serves full and causal calls for which there is no other), ``logits``
        (plain, capped).
      threads: threads of a CTA, a multiple of 32.
      grid: factors of the CTA count: symbols, ``X/c`` (rounded up), integers.
      params: kernel parameters in order.
      cluster: cluster shape; x must divide the grid at run time.
      ctas_per_sm: None, or c for a persistent grid of at most ``c * num_sms`` CTAs (rounded down
        to whole clusters).
      shared: None to take what the DSL allocated; a number of bytes for a kernel that lays out
        its dynamic shared memory itself.

    Raises:
      ValueError: names the kernel and the field that the launcher could not honour.
    """

    name: str
    architecture: str
    operation: str
    select: Mapping[str, str | int]
    threads: int
    grid: tuple[str | int, ...]
    params: tuple[Parameter, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    ctas_per_sm: int | None = None
    shared: int | None = None

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(f"kernel {self.name!r}: {message}")

        require(re.fullmatch(r"[a-z0-9_]+", self.name) is not None, "name is not [a-z0-9_]+")
        require(
            re.fullmatch(r"sm_\d+[af]?", self.architecture) is not None,
            f"architecture {self.architecture!r} is not like 'sm_90a'",
        )
        require(
            self.operation in OPERANDS,
            f"operation {self.operation!r} is not one of {sorted(OPERANDS)}",
        )
        for key, value in self.select.items():
            require(key in _SELECT, f"select key {key!r} is not one of {sorted(_SELECT)}")
            require(_SELECT[key](value), f"select {key} has the bad value {value!r}")
        require(
            0 < self.threads <= 1024 and self.threads % 32 == 0,
            f"threads {self.threads} is not a multiple of 32 up to 1024",
        )
        require(
            len(self.cluster) == 3
            and self.cluster[1:] == (1, 1)
            and 1 <= self.cluster[0] <= 16
            and math.log2(self.cluster[0]).is_integer(),
            f"cluster {self.cluster} is not (power of two up to 16, 1, 1); the grid is 1-D",
        )
        require(bool(self.grid), "grid has no factor")
        for factor in self.grid:
            require(
                re.fullmatch(rf"(?:{'|'.join(SYMBOLS)})(?:/[1-9]\d*)?|[1-9]\d*", str(factor))
                is not None,
                f"grid factor {factor!r} is neither a symbol, symbol/c nor an integer",
            )
        require(
            self.ctas_per_sm is None or self.ctas_per_sm > 0,
            f"ctas_per_sm {self.ctas_per_sm} is not positive",
        )
        require(
            self.shared is None or 0 <= self.shared <= SHARED_LIMIT,
            f"shared {self.shared} bytes is not within 0..{SHARED_LIMIT}",
        )
        for parameter in self.params:
            self._check_parameter(parameter, require)

    def _check_parameter(self, parameter: Parameter, require: Callable[[bool, str], None]) -> None:
        if isinstance(parameter, S32):
            require(parameter.symbol in SYMBOLS, f"unknown symbol {parameter.symbol!r}")
        elif isinstance(parameter, F32):
            require(parameter.symbol in F32_SYMBOLS, f"unknown float32 symbol {parameter.symbol!r}")
        else:
            operands = OPERANDS[self.operation]
            operand = parameter.operand
            require(operand in operands, f"unknown operand {operand!r} of {self.operation}")
            dimensions, element = operands[operand]
            require(
                element != "data" or "dtype" in self.select,
                f"operand {operand} has the call's dtype, so select must have 'dtype'",
            )
            if isinstance(parameter, TensorMap):
                rank = len(dimensions.split())
                require(
                    len(parameter.box) == rank and all(0 < n <= 256 for n in parameter.box),
                    f"box {parameter.box} of {operand} needs {rank} extents in 1..256",
                )
                require(
                    parameter.swizzle in (0, 32, 64, 128),
                    f"swizzle {parameter.swizzle} of {operand} is not 0, 32, 64 or 128",
                )
                if parameter.packed:
                    require(
                        rank == 4
                        and dimensions.split()[1:3] == ["T", "N"]
                        and parameter.box[1] * PACKED_ROWS <= 256
                        and parameter.box[2] % PACKED_ROWS == 0,
                        f"{operand} [{dimensions}] with box {parameter.box} cannot be packed: that "
                        f"takes [B T N .], at most {256 // PACKED_ROWS} heads and a multiple of "
                        f"{PACKED_ROWS} positions",
                    )
                row = parameter.box[0] * ELEMENT_BYTES[self.element_type(operand)]
                require(
                    row % 16 == 0 and (parameter.swizzle == 0 or row <= parameter.swizzle),
                    f"inner box of {operand} is {row} bytes: not a multiple of 16 or more than "
                    f"the swizzle span {parameter.swizzle}",
                )

    def element_type(self, operand: str) -> str:
        """bf16, f16, f32 or s32: what ``operand`` holds in calls that select this kernel."""
        element = OPERANDS[self.operation][operand][1]
        return str(self.select["dtype"]) if element == "data" else element

    def to_manifest(self, *, entry: str, registers: int, shared: int) -> str:
        """The kernel's block in ``manifest.txt``, without the blank line that ends it.

        Args:
          entry: mangled entry name in the cubin.
          registers: registers per thread at launch, from the cubin (information only).
          shared: dynamic shared memory in bytes.

        Returns:
          One ``key value...`` pair a line: kernel, architecture, operation, entry, select (once
          per key), threads, cluster, shared, registers, grid, param (once per parameter, in
          order). A grid is ``FACTOR*FACTOR...``, each a symbol, ``symbol/c`` or an integer, and
          for a persistent one ``limit num_sms*c`` after it. A param is one of::

            param tensor_map OPERAND box N N... swizzle N [packed]
            param pointer OPERAND
            param s32 SYMBOL
            param f32 F32_SYMBOL
        """
        grid = "*".join(str(factor) for factor in self.grid)
        if self.ctas_per_sm is not None:
            grid += f" limit num_sms*{self.ctas_per_sm}"
        lines = [
            f"kernel {self.name}",
            f"architecture {self.architecture}",
            f"operation {self.operation}",
            f"entry {entry}",
            *(f"select {key} {value}" for key, value in self.select.items()),
            f"threads {self.threads}",
            "cluster " + " ".join(str(n) for n in self.cluster),
            f"shared {shared}",
            f"registers {registers}",
            f"grid {grid}",
        ]
        for parameter in self.params:
            match parameter:
                case TensorMap(operand, box, swizzle, packed):
                    extents = " ".join(str(n) for n in box)
                    lines.append(
                        f"param tensor_map {operand} box {extents} swizzle {swizzle}"
                        + (" packed" if packed else "")
                    )
                case Pointer(operand):
                    lines.append(f"param pointer {operand}")
                case S32(symbol):
                    lines.append(f"param s32 {symbol}")
                case F32(symbol):
                    lines.append(f"param f32 {symbol}")
        return "\n".join(lines) + "\n"


_SELECT: Mapping[str, Callable[[Any], bool]] = {
    "dtype": lambda value: value in ("bf16", "f16"),
    "head_dim": lambda value: isinstance(value, int) and value > 0 and value % 8 == 0,
    "mask": lambda value: value in ("full", "causal", "window", "segments"),
    "logits": lambda value: value in ("plain", "capped"),
}


class Kernel(Protocol):
    """One compilable kernel instance: what the elements of ``variants()`` must offer."""

    kernel: Any
    """The ``@cute.kernel`` method; its arguments are ``declaration().params`` in order."""

    def declaration(self) -> KernelSpec:
        """The kernel's statement of itself; the same at every call."""
        ...
