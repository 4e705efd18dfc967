"""Inputs, configurations, calls and measures of error for the tests of quantised attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from fa4_jax import quantize as qz
from fa4_jax import quantized
from fa4_jax.spec import AttentionSpec, Operands

ROUTES = {**qz.SHORT_NAMES, "nvfp4": qz.NVFP4_ALL}
EXACT_FP4 = dataclasses.replace(qz.FP4, classifier=qz.EXACT)
GUARDED = dataclasses.replace(qz.FP4, row_reference=qz.SampledGuard(110, 16))


def gaussian(S, N=1, K=1, H=128, B=1, T=None, seed=0, amplitude=1.0):
    """q, k, v in float32; logits have standard deviation amplitude**2."""
    rng = np.random.default_rng(seed)
    shapes = ((B, T or S, N, H), (B, S, K, H), (B, S, K, H))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q * np.float32(amplitude), k * np.float32(amplitude), v


def gaussian_dout(q, seed=12):
    """The gradient of an output that is as long as the query."""
    return np.random.default_rng(seed).standard_normal(q.shape).astype(np.float32)


def make_spec(config, H=128, **options):
    return AttentionSpec(scale=H**-0.5, quantization=config, **options)


def quantize_operands(config, **arrays):
    """The containers of the operands named query, key or value."""
    return {
        name: quantized.quantize_operand(config, name, jnp.asarray(x)) for name, x in arrays.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def call(spec, operands):
    """One program for each spec and shapes, shared by the tests."""
    return quantized.attend(spec, operands)


def attend(config, q, k, v, *, scale=None, left=None, right=None, jitted=call, **arrays):
    """`quantized.attend` as float64 NumPy arrays."""
    scale = jnp.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    spec = AttentionSpec(left=left, right=right, quantization=config)
    outputs = jitted(spec, Operands(q, k, v, scale=scale, **arrays))
    return [np.asarray(x, np.float64) for x in outputs]


@functools.partial(jax.jit, static_argnums=0)
def pull_back(spec, operands, cotangents):
    """(dq, dk, dv) of `quantized.attend` for the gradients of its two outputs."""

    def outputs(query, key, value):
        arrays = dataclasses.replace(operands, query=query, key=key, value=value)
        return quantized.attend(spec, arrays)

    primals = (operands.query, operands.key, operands.value)
    return jax.vjp(outputs, *primals)[1](cotangents)


def gradients(config, q, k, v, dout, *, dlse=None, observe=None, scale=None, **arrays):
    """Causal (dq, dk, dv) of `quantized.attend` as float64 arrays."""
    config = dataclasses.replace(config, observe_gradients=observe)
    scale = jnp.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    dlse = np.zeros(q.shape[:3], np.float32) if dlse is None else dlse
    spec = AttentionSpec(right=0, quantization=config)
    result = pull_back(spec, Operands(q, k, v, scale=scale, **arrays), (dout, dlse))
    jax.effects_barrier()
    return [np.asarray(x, np.float64) for x in result]


def cosine(x, y):
    x, y = (np.asarray(a, np.float64).ravel() for a in (x, y))
    return x @ y / np.sqrt((x @ x) * (y @ y))


def relative(x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def check_gradients(actual, expected, floor=0.98):
    """(dq, dk, dv) against `oracle.Attention.gradients`, in direction and in length.

    A factor left in a gradient does not change its cosine.
    """
    for name, x in zip(("query", "key", "value"), actual, strict=True):
        y = expected[name]
        assert cosine(x, y) >= floor, (name, cosine(x, y))
        assert relative(x, y) < 0.2, (name, relative(x, y))
