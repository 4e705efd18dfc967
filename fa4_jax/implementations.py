"""Which implementation serves a call, and every reason why one cannot.

`reasons` is the only place that knows the limits of the CUDA kernels. The implementations:

- `"fa4"`: the CUDA kernels. `fa4.attend(spec, operands, fallback=True)` lowers to them for CUDA
  and to `xla` for any other platform; with `fallback=False` other platforms are an error.
- `"emulated"`: `fa4.emulated(spec, operands)`, the same custom calls executed on the CPU.
- `"xla"`: `xla.attend(spec, operands)`, plain JAX on any backend; it serves every exact call.
"""

from __future__ import annotations

import jax.numpy as jnp

from fa4_jax.spec import AttentionSpec, Operands

NAMES = ("fa4", "xla", "emulated")

KERNEL_DTYPES = ("bfloat16", "float16")
KERNEL_MAX_HEAD_DIM = 128
# Rows of 16 bytes: what a tensor map needs of every stride, with 2-byte elements.
KERNEL_HEAD_DIM_MULTIPLE = 8


def reasons(spec: AttentionSpec, operands: Operands) -> tuple[str, ...]:
    """Every reason why the CUDA kernels cannot serve this call; empty when they can.

    Only shapes, dtypes and which arguments are present matter, so this works on tracers.
    """
    found = []
    for name, why in (
        ("bias", "the kernels add no bias to the logits"),
        ("mask", "the kernels read no mask array (causal, window and lengths are served)"),
        ("query_segment_ids", "the kernels compare no segment ids"),
        ("sinks", "the kernels have no sink in the softmax denominator"),
    ):
        if getattr(operands, name) is not None:
            found.append(f"{name}: {why}")
    if spec.logits_soft_cap is not None:
        found.append(f"logits_soft_cap={spec.logits_soft_cap}: the kernels do not cap logits")
    if spec.deterministic:
        found.append(
            "deterministic=True: the backward kernel adds the query gradient in varying order"
        )
    if spec.quantization is not None:
        found.append(f"quantization={spec.quantization!r}: no quantised kernel is in this bundle")
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
