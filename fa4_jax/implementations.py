"""Which implementation serves a call, and every reason why one cannot.

- `"fa4"`: the CUDA kernels. `reasons` is the only place that knows their limits.
- `"emulated"`: the same custom calls, their PTX executed on the CPU; the same limits.
- `"xla"`: plain JAX on any backend; it serves every exact call, and quantised ones (`quantized`).
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp

from fa4_jax import bundle, fa4, quantized, xla
from fa4_jax.spec import AttentionSpec, Operands

NAMES = ("fa4", "xla", "emulated")

KERNEL_DTYPES = ("bfloat16", "float16")
KERNEL_MAX_HEAD_DIM = 128
# Rows of 16 bytes: what a tensor map asks of every stride, with 2-byte elements.
KERNEL_HEAD_DIM_MULTIPLE = 8

_warned: set[str] = set()


def reasons(spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """Every reason why the CUDA kernels cannot serve this call; empty when they can.

    Only shapes, dtypes and which arguments are present matter, so this works on tracers.
    """
    found = []
    for name, why in (
        ("bias", "the kernels add no bias to the logits"),
        ("mask", "the kernels read no mask array (windows, lengths and segments are served)"),
    ):
        if getattr(operands, name) is not None:
            found.append(f"{name}: {why}")
    if spec.deterministic:
        found.append("deterministic=True: the backward kernel sums in varying order")
    if spec.quantization is not None:
        found.append(f"quantization={spec.quantization!r}: there is no quantised kernel")
    dtype = jnp.dtype(operands.query.dtype).name
    if dtype not in KERNEL_DTYPES:
        found.append(f"dtype {dtype}: the kernels compute in {' and '.join(KERNEL_DTYPES)}")
    sizes = operands.sizes
    for name, size in (("query and key", sizes.H), ("value", sizes.Hv)):
        if size > KERNEL_MAX_HEAD_DIM or size % KERNEL_HEAD_DIM_MULTIPLE:
            found.append(
                f"head dimension {size} of {name}: the kernels take multiples of "
                f"{KERNEL_HEAD_DIM_MULTIPLE} up to {KERNEL_MAX_HEAD_DIM}"
            )
    return tuple(found)


def attend(
    spec: AttentionSpec, operands: Operands, implementation: str | tuple[str, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """Runs the first implementation that can serve the call.

    Args:
      spec, operands: the call.
      implementation: one of `NAMES`; a tuple of them in order of preference; or None for the
        kernels and else XLA, with a warning for each reason against the kernels, given once.

    Returns:
      out [B, T, N, Hv] and lse [B, T, N] as `xla.attend` describes them.

    Raises:
      NotImplementedError: none can; lists every reason of each.
    """
    order = ("fa4", "xla") if implementation is None else implementation
    order = (order,) if isinstance(order, str) else order
    why_not = {name: refusals(name, spec, operands) for name in order}
    if "fa4" in order[:-1] and (gpu := unserved_gpu()):
        # Where there is a choice. An explicit "fa4" may be meant for another machine's GPU.
        why_not["fa4"] += (gpu,)
    chosen = next((name for name in order if not why_not[name]), None)
    if chosen is None:
        raise NotImplementedError(
            "\n".join(
                f'fa4_jax implementation "{name}" cannot serve this call:\n  '
                + "\n  ".join(why_not[name])
                for name in order
            )
        )
    if implementation is None:
        for reason in why_not["fa4"]:
            _warn_once(reason)
    if spec.quantization is not None:
        return quantized.attend(spec, operands)
    if chosen == "xla" or 0 in operands.query.shape + operands.key.shape:
        return xla.attend(spec, operands)
    platform = "cpu" if chosen == "emulated" else "cuda"
    if chosen == "fa4" and "xla" in order[order.index("fa4") :]:
        platform = None  # one program for every platform: where there are no kernels it is XLA's
    return fa4.attend(spec, operands, platform=platform)


def refusals(name: str, spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """Every reason why an implementation cannot serve the call, on whatever device."""
    if name == "xla":
        if spec.quantization is None:
            return ()
        return quantized.unsupported(spec, operands)
    found = reasons(spec, operands)
    try:
        bundle.directory()
    except bundle.BundleError as error:
        found += (str(error),)
    return found


def unserved_gpu() -> str | None:
    """Why the kernels cannot run on this process's GPU; None where they can, or there is no GPU."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    try:
        architectures = bundle.architectures()
    except bundle.BundleError:
        return None  # a reason of its own
    # sm_90a is for exactly 9.0: cubins with architecture-specific instructions run nowhere else.
    served = {architecture.removeprefix("sm_").rstrip("af") for architecture in architectures}
    if capability is not None and capability.replace(".", "") in served:
        return None
    return (
        f"{device.device_kind} has compute capability {capability}, the bundle holds "
        + ", ".join(architectures)
    )


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        # The frames between here and the caller of `dot_product_attention`: attend and itself.
        warnings.warn(f"fa4_jax uses XLA for attention, not its kernels. {reason}", stacklevel=4)
        # Afterwards: where warnings are errors, every call has to fail.
        _warned.add(reason)
