"""The Hopper kernels on the emulator: values and gradients, hardware's results, schedules, mutants.

The value tests take the users' road: `fa4_jax.dot_product_attention` under jit and grad, the typed
custom calls, the bundle's PTX. The emulator pretends to have two SMs, so that every CTA of a
persistent grid takes several tiles and its rings go round, and checks for races all along.

`python tests/mutants.py` tells what each check finds when synchronisation is missing.
"""

import os

# The library reads these once, at its first emulated call.
os.environ.setdefault("FA4_JAX_EMULATED_SMS", "2")
os.environ.setdefault("FA4_JAX_EMULATED_RACES", "1")

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fixtures import make_sm90

import fa4_jax

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("built_library")]

FIXTURE = pathlib.Path(make_sm90.__file__).with_name("sm90_h200.npz")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes B, T, S, N, K, H, Hv and the arguments of one call."""

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: str = "bfloat16"
    masks: dict = dataclasses.field(default_factory=dict)
    scale: float | None = None


CASES = {
    "full": Case((1, 137, 201, 2, 1, 64, 64)),
    "full_h128": Case((1, 137, 201, 1, 1, 128, 128), "float16"),
    "full_h72": Case((1, 65, 129, 1, 1, 72, 40), scale=-0.2),
    "causal": Case((2, 193, 193, 2, 2, 128, 128), masks=dict(is_causal=True)),
    "causal_h64": Case((1, 301, 301, 1, 1, 64, 64), "float16", dict(is_causal=True)),
    "causal_h96": Case((1, 131, 199, 4, 2, 96, 96), masks=dict(is_causal=True)),
    "offset": Case(
        (2, 67, 301, 2, 1, 128, 128), masks=dict(is_causal=True, query_offset=[234, -9])
    ),
    "window": Case((1, 261, 261, 1, 1, 64, 64), masks=dict(local_window_size=(50, 20))),
    "window_h128": Case((1, 261, 261, 1, 1, 128, 128), "float16", dict(local_window_size=(0, 90))),
    "lengths": Case(
        (3, 150, 190, 2, 1, 128, 128),
        masks=dict(
            is_causal=True, query_seq_lengths=[150, 77, 0], key_value_seq_lengths=[131, 20, 190]
        ),
    ),
    "lengths_h72": Case(
        (2, 99, 260, 1, 1, 72, 72), "float16", dict(key_value_seq_lengths=[129, 0]), scale=-0.1
    ),
    "one_row": Case((2, 1, 1, 1, 1, 8, 8), masks=dict(is_causal=True)),
}


def padded(x: np.ndarray, lengths: list[int] | None, filling: float) -> np.ndarray:
    """x [B, rows, ...] with ``filling`` past each batch element's length."""
    x = x.copy()
    for b, length in enumerate(lengths or ()):
        x[b, length:] = filling
    return x


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_right(case):
    """By the accuracy rule against float64, with NaN wherever no query may look."""
    B, T, S, N, K, H, Hv = case.sizes
    dtype = jnp.dtype(case.dtype)
    random = np.random.default_rng(len(case.masks) + H)
    rows = case.masks.get("query_seq_lengths"), case.masks.get("key_value_seq_lengths")
    shapes = {
        "query": ((B, T, N, H), rows[0]),
        "key": ((B, S, K, H), rows[1]),
        "value": ((B, S, K, Hv), rows[1]),
        "dout": ((B, T, N, Hv), rows[0]),
    }
    normal = {
        name: random.standard_normal(shape).astype(dtype) for name, (shape, _) in shapes.items()
    }
    clean, dirty = (
        {name: padded(x, shapes[name][1], filling) for name, x in normal.items()}
        for filling in (0, np.nan)
    )
    dlse = padded(random.standard_normal((B, T, N)).astype(np.float32), rows[0], 0)

    @jax.jit
    def call(query, key, value, dout):
        def attend(*arrays):
            out, lse = fa4_jax.dot_product_attention(
                *arrays,
                scale=case.scale,
                return_residual=True,
                implementation="emulated",
                **{k: jnp.array(v) if isinstance(v, list) else v for k, v in case.masks.items()},
            )
            # A row that sees nothing has no lse to differentiate.
            return out, jnp.where(lse == -jnp.inf, 0, lse), lse

        (out, _, lse), pull = jax.vjp(attend, query, key, value)
        return out, lse, *pull((dout, jnp.asarray(dlse), jnp.zeros_like(lse)))

    names = ("out", "lse", "query", "key", "value")
    found = {n: np.asarray(x) for n, x in zip(names, call(**dirty), strict=True)}

    arrays = (clean["query"], clean["key"], clean["value"])
    exact, rounded = (
        oracle.Attention(*arrays, scale=case.scale, masks=case.masks, rounding=rounding)
        for rounding in (None, dtype)
    )
    seen = np.where(np.isinf(exact.lse), 0, dlse)
    gradients = [attention.gradients(clean["dout"], seen) for attention in (exact, rounded)]
    oracle.assert_accurate("out", found["out"], exact.out, rounded.out)
    for name in ("query", "key", "value"):
        oracle.assert_accurate(f"d{name}", found[name], *(g[name] for g in gradients))
    # The float32 log-sum-exp has no 16-bit reference: a few units in the last place of its terms.
    np.testing.assert_allclose(found["lse"], exact.lse, rtol=1e-6, atol=4e-6)
