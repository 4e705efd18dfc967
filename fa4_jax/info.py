"""``python -m fa4_jax info``: versions, devices, the kernel bundle, and what serves a given call.

::

    python -m fa4_jax info
    python -m fa4_jax info --shape 2,1024,1024,16,4,128 --causal --arrays bias
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import importlib.metadata
import platform
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fa4_jax import api, bundle, implementations, quantize
from fa4_jax.quantize.config import SHORT_NAMES
from fa4_jax.spec import AttentionSpec, Operands

# The kernels are assembled by CUDA 13's assembler; older drivers refuse its cubins.
OLDEST_DRIVER = 580


def driver_version() -> str | None:
    """The NVIDIA driver's version as NVML tells it, None where there is no driver.

    Reference: NVML API, ``nvmlSystemGetDriverVersion``.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
    if nvml.nvmlInit_v2():
        return None
    failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return None if failed else text.value.decode()


def compute_capability(device: Any) -> str | None:
    """The compute capability of a GPU, e.g. ``"9.0"``; None for a device that is no NVIDIA GPU."""
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


def machine() -> str:
    """The devices (first line) and the versions (second line)."""
    devices = collections.Counter(
        device.device_kind
        + (f" ({compute_capability(device)})" if compute_capability(device) else "")
        for device in jax.devices()
    )
    driver = driver_version()
    try:
        own = importlib.metadata.version("fa4-jax-ffi")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed, run from its source tree"
    return (
        ", ".join(f"{count} x {kind}" for kind, count in devices.items())
        + (f", driver {driver}" if driver else ", no NVIDIA driver")
        + f"\nPython {platform.python_version()}, jax {jax.__version__}, "
        + f"jaxlib {importlib.metadata.version('jaxlib')}, fa4-jax-ffi {own}"
    )


def bundle_summary() -> str:
    """One line for each architecture and operation of the bundle, or why there is none."""
    try:
        kernels = bundle.kernels()
    except bundle.BundleError as error:
        return str(error)
    groups = collections.defaultdict(list)
    for kernel in kernels:
        groups[kernel.architecture, kernel.operation].append(kernel)
    lines = []
    for (arch, operation), group in groups.items():
        served = collections.defaultdict(dict)  # a dict as an ordered set
        for kernel in group:
            for key, value in kernel.select.items():
                served[key][value] = None
        selects = "; ".join(f"{key} {' '.join(values)}" for key, values in served.items())
        lines.append(f"{arch} {operation}: {len(group)} kernels ({selects})")
    return "\n".join(lines)


def kernel_table() -> str:
    """Every kernel of the bundle with its resources. Raises ``BundleError`` when there is none."""
    kernels = bundle.kernels()
    width = max((len(kernel.name) for kernel in kernels), default=0)
    return "\n".join(
        f"{kernel.name:<{width}}  {kernel.architecture:<8} {kernel.threads:>4} threads "
        f"{kernel.registers:>4} registers {kernel.shared:>7} bytes of shared memory"
        for kernel in kernels
    )


def refusals(spec: AttentionSpec, operands: Operands) -> dict[str, tuple[str, ...]]:
    """Why each implementation cannot serve a call on the default device; empty where one can.

    Beyond :func:`fa4_jax.implementations.refusals`, which are the same everywhere, these say what
    this machine lacks. ``operands`` may hold ``jax.ShapeDtypeStruct`` in the place of arrays.
    """
    platform = jax.default_backend()
    found = {name: implementations.refusals(name, spec, operands) for name in implementations.NAMES}
    gpu = implementations.unserved_gpu()
    if platform != "gpu":
        gpu = f"the default device is a {platform}, the kernels run on NVIDIA GPUs"
    if gpu is not None:
        found["fa4"] += (gpu,)
    if platform != "cpu":
        found["emulated"] += (f"the default device is a {platform}, the emulator runs on the CPU",)
    return found


def explain(
    spec: AttentionSpec, operands: Operands, implementation: str | None = None
) -> tuple[str | None, str]:
    """What serves a call on the default device.

    Args:
      spec, operands: the call; see :func:`call`.
      implementation: as for ``dot_product_attention``, but no tuple.

    Returns:
      The implementation's name, None if there is none, and an account of it: one line, and a line
      for each reason against the others.
    """
    why = refusals(spec, operands)
    order = ("fa4", "xla") if implementation is None else (implementation,)
    chosen = next((name for name in order if not why[name]), None)
    capability = compute_capability(jax.devices()[0])
    what = {
        "fa4": f"the bundle's cubins for compute capability {capability}",
        "xla": "plain JAX",
        "emulated": "the bundle's PTX, executed on the CPU",
        None: f"implementation={implementation!r} cannot serve this call",
    }[chosen]
    lines = [f"attention is computed by {chosen!r}: {what}" if chosen else what]
    for name, reasons in why.items():
        if reasons:
            lines += [f"  not {name!r}:", *(f"    {reason}" for reason in reasons)]
    return chosen, "\n".join(lines)


ARRAYS = ("bias", "mask", "lengths", "offset", "segments", "sinks")
"""The optional arrays of :func:`call`."""


def call(
    shape: tuple[int, int, int, int, int, int],
    dtype: DTypeLike,
    is_causal: bool = False,
    *,
    value_dim: int | None = None,
    window: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    deterministic: bool = False,
    quantization: quantize.QuantizationConfig | str | None = None,
    arrays: Collection[str] = (),
) -> tuple[AttentionSpec, Operands]:
    """The canonical form of a call, with ``jax.ShapeDtypeStruct`` in the place of arrays.

    Args:
      shape: batch, queries, keys, query heads, key/value heads, head dimension.
      dtype: of query, key and value.
      value_dim: head dimension of value, by default that of key.
      is_causal, logits_soft_cap, deterministic, quantization: as for ``dot_product_attention``.
      window: its ``local_window_size``.
      arrays: which of :data:`ARRAYS` are given: bias ``[B, N, T, S]``, mask ``[B, 1, T, S]``,
        the lengths and segment ids of queries and keys, query_offset, sinks.
    """
    B, T, S, N, K, H = shape

    def array(name: str, *shape: int, dtype: DTypeLike = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype) if name in arrays else None

    left, right = window or (None, None)
    spec = AttentionSpec(
        left=left,
        right=0 if is_causal else right,
        scale=H**-0.5,
        logits_soft_cap=logits_soft_cap,
        deterministic=deterministic,
        quantization=quantize.resolve(quantization),
    )
    inputs: dict[str, Any] = {
        "query": jax.ShapeDtypeStruct((B, T, N, H), dtype),
        "key": jax.ShapeDtypeStruct((B, S, K, H), dtype),
        "value": jax.ShapeDtypeStruct((B, S, K, value_dim or H), dtype),
    }
    return spec, Operands(
        **inputs,
        bias=array("bias", B, N, T, S, dtype=jnp.float32),
        mask=array("mask", B, 1, T, S, dtype=jnp.bool_),
        query_seq_lengths=array("lengths", B),
        key_value_seq_lengths=array("lengths", B),
        query_offset=array("offset", B),
        query_segment_ids=array("segments", B, T),
        key_value_segment_ids=array("segments", B, S),
        sinks=array("sinks", N, dtype=jnp.float32),
    )


def integers(count: int) -> Callable[[str], tuple[int, ...]]:
    """Parser of a flag of ``count`` counts joined by commas."""

    def parse(text: str) -> tuple[int, ...]:
        values = tuple(map(int, text.split(",")))
        if len(values) != count or min(values) < 0:
            raise argparse.ArgumentTypeError(f"expected {count} counts joined by commas: {text!r}")
        return values

    return parse


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fa4_jax info",
        description="Versions, devices, the kernel bundle, and what serves the call that the "
        "flags describe.",
    )
    parser.add_argument("--kernels", action="store_true", help="list every kernel of the bundle")
    parser.add_argument(
        "--shape",
        type=integers(6),
        metavar="B,T,S,N,K,H",
        default=(1, 1024, 1024, 8, 8, 128),
        help="batch, queries, keys, query heads, key/value heads, head dim (default: %(default)s)",
    )
    parser.add_argument("--value-dim", type=int, metavar="Hv", help="head dim of value, if not H")
    parser.add_argument("--dtype", choices=api.DTYPES, default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=integers(2), metavar="LEFT,RIGHT")
    parser.add_argument("--soft-cap", type=float, metavar="C", help="logits_soft_cap")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--quantization", choices=SHORT_NAMES)
    parser.add_argument("--arrays", nargs="+", choices=ARRAYS, default=[], help="given as well")
    parser.add_argument("--implementation", choices=implementations.NAMES)
    arguments = parser.parse_args(argv)
    *_, N, K, H = arguments.shape
    if 0 in (N, K, H) or N % K:
        parser.error(
            f"argument --shape: N, K, H must be positive, N a multiple of K: {N}, {K}, {H}"
        )

    print(machine())
    driver = driver_version()
    if driver and int(driver.partition(".")[0]) < OLDEST_DRIVER:
        print(f"the kernels need driver {OLDEST_DRIVER} or newer")
    print("\nkernel bundle")
    try:
        print(kernel_table() if arguments.kernels else bundle_summary())
    except bundle.BundleError as error:
        print(error)
    print("\nthis call")
    spec, operands = call(
        arguments.shape,
        arguments.dtype,
        value_dim=arguments.value_dim,
        is_causal=arguments.causal,
        window=arguments.window,
        logits_soft_cap=arguments.soft_cap,
        deterministic=arguments.deterministic,
        quantization=arguments.quantization,
        arrays=arguments.arrays,
    )
    print(explain(spec, operands, arguments.implementation)[1])
    return 0
