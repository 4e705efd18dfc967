"""Segments, soft cap and sinks through the public function: values and every gradient.

`None` on the CPU is the kernels' transforms over XLA, `"emulated"` the kernels themselves. On a GPU
they are in `test_kernels_gpu.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import bundle, dot_product_attention, segments

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@pytest.fixture(
    params=["xla", None, pytest.param("emulated", marks=pytest.mark.emulator)],
    ids=["xla", "automatic", "emulated"],
)
def implementation(request):
    if request.param == "emulated":
        request.getfixturevalue("emulator")
    return request.param


@pytest.fixture(scope="module")
def emulator(built_library):
    """Skips where the bundle was built before the kernels took segments."""
    if not any(kernel.select.get("mask") == "segments" for kernel in bundle.kernels()):
        pytest.skip("the bundle has no kernels with segments")


def packed(batch, size, *lengths):
    """Ids of packed sequences of the given lengths; the rest is padding with an id of its own."""
    ids = np.repeat(np.arange(len(lengths)), lengths)[:size]
    return np.tile(np.pad(ids, (0, size - len(ids)), constant_values=-1), (batch, 1)).astype(
        np.int32
    )


def scattered(batch, size, values, seed):
    return np.random.default_rng(seed).choice(np.int32(values), (batch, size))


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: dtype, sizes B, T, S, N, K, H, Hv, masks as the oracle takes them, and what is added.

    Attributes:
      gain: factor of the query, so that a cap matters.
    """

    dtype: str
    sizes: tuple[int, int, int, int, int, int, int]
    masks: dict = dataclasses.field(default_factory=dict)
    cap: float | None = None
    sinks: tuple[float, ...] | None = None
    scale: float = 0.125
    gain: float = 1.0


CASES = {
    "packed": Case(
        "f16",
        (1, 200, 200, 2, 1, 64, 64),
        dict(
            is_causal=True,
            query_segment_ids=packed(1, 200, 30, 70, 64, 20),
            key_value_segment_ids=packed(1, 200, 30, 70, 64, 20),
        ),
    ),
    "cap": Case("bf16", (1, 150, 130, 2, 2, 64, 64), dict(is_causal=True), cap=2.0, gain=4),
    "sinks": Case(
        "bf16",
        (2, 70, 150, 4, 2, 64, 64),
        dict(query_seq_lengths=np.int32([70, 9]), key_value_seq_lengths=np.int32([0, 140])),
        sinks=(0.0, 3.0, -40.0, 20.0),
    ),
    "all": Case(
        "f16",
        (2, 150, 200, 2, 1, 64, 48),
        dict(
            local_window_size=(90, 40),
            query_offset=np.int32([30, -20]),
            query_seq_lengths=np.int32([140, 150]),
            key_value_seq_lengths=np.int32([190, 100]),
            query_segment_ids=scattered(2, 150, [0, 1, 2, 5], 0),
            key_value_segment_ids=scattered(2, 200, [1, 2, 3, 4], 1),
        ),
        cap=1.5,
        sinks=(0.5, -1.0),
        scale=-0.3,
    ),
}


def inputs(case, filling=0.0):
    """Floating operands and cotangents, with `filling` wherever nobody looks."""
    B, T, S, N, K, H, Hv = case.sizes
    random = np.random.default_rng(T + S)
    visible = oracle.visible_keys((B, 1, T, S), **case.masks)[:, 0]

    def normal(seen, *shape, gain=1.0, dtype=DTYPES[case.dtype]):
        x = gain * random.normal(size=shape)
        return np.where(seen.reshape(*seen.shape, *[1] * (len(shape) - 2)), x, filling).astype(
            dtype
        )

    queries, keys = visible.any(2), visible.any(1)
    operands = {
        "query": normal(queries, B, T, N, H, gain=case.gain),
        "key": normal(keys, B, S, K, H),
        "value": normal(keys, B, S, K, Hv),
        "scale": np.float32(case.scale),
    }
    if case.sinks is not None:
        operands["sinks"] = np.float32(case.sinks)
    dout = normal(queries, B, T, N, Hv)
    dlse = normal(queries, B, T, N, dtype=np.float32)
    return operands, (dout, dlse)


def attend(case, implementation, **operands):
    return dot_product_attention(
        **operands,
        **case.masks,
        logits_soft_cap=case.cap,
        return_residual=True,
        implementation=implementation,
    )


def run(case, implementation, operands, cotangents):
    """out, lse and the gradients by name."""

    @jax.jit
    def compute(operands, cotangents):
        results, pullback = jax.vjp(
            lambda operands: attend(case, implementation, **operands), operands
        )
        return *results, pullback(cotangents)[0]

    return jax.device_get(compute(jax.tree.map(jnp.asarray, operands), cotangents))


@functools.cache
def expected(name):
    """Of float64 attention, and of dense attention in the inputs' dtype."""
    case = CASES[name]
    operands, cotangents = inputs(case)
    references = []
    for rounding in (None, DTYPES[case.dtype]):
        reference = oracle.Attention(
            **operands, logits_soft_cap=case.cap, masks=case.masks, rounding=rounding
        )
        references.append((reference.out, reference.lse, reference.gradients(*cotangents)))
    return references


def check(name, found):
    exact, rounded = expected(name)
    oracle.assert_accurate("out", found[0], exact[0], rounded[0])
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-6, atol=1e-4)
    for operand, gradient in found[2].items():
        oracle.assert_accurate(f"d{operand}", gradient, exact[2][operand], rounded[2][operand])


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(implementation, name):
    """With NaN wherever nobody looks, in the cotangents too."""
    check(name, run(CASES[name], implementation, *inputs(CASES[name], np.nan)))
