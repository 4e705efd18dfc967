"""The kernels on a real GPU: out, lse and every gradient, one by one, by the accuracy rule.

Small cases are compared with the float64 oracle, large ones with XLA attention in float32 (which
`test_xla.py` compares with the oracle) and dense attention in the inputs' dtype, on the GPU.
"""

import dataclasses
import functools
import itertools
import types
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import fa4_jax

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 250, 1024, 4092)
HEAD_DIMS = (64, 72, 96, 128)
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
HEADS = ((2, 2), (8, 2), (4, 1))
# Scores of all heads for which the oracle takes no longer than a compilation.
ORACLE_SCORES = 2**22


def options(kind, B, T, S):
    """Masking arguments of a kind of call; for batch elements of unlike lengths."""
    batch = np.arange(B)
    return {
        "full": {},
        "causal": {"is_causal": True},
        "causal at the end": {"is_causal": True, "query_offset": np.full(B, S - T, np.int32)},
        "window": {"local_window_size": (S // 3, S // 7)},
        "causal window": {"is_causal": True, "local_window_size": (70, 0)},
        "lengths": {
            "query_seq_lengths": np.int32(T - batch * T // 3),
            "key_value_seq_lengths": np.int32(S - (B - batch) * S // 3),
        },
        "causal lengths": {
            "is_causal": True,
            "query_seq_lengths": np.int32((B - batch) * T // B),
            "key_value_seq_lengths": np.int32(batch * S // B),
        },
        "window offsets": {
            "local_window_size": (50, 5),
            "query_offset": np.int32(batch * 40 - 20),
        },
    }[kind]


KINDS = (
    "full",
    "causal",
    "causal at the end",
    "window",
    "causal window",
    "lengths",
    "causal lengths",
    "window offsets",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      kind: one of `KINDS`.
      heads: of query, of key and value.
      features: some of "packed" or "scattered" segments, "cap" and "sinks". With any of them the
        scale is traced and differentiated too.
    """

    T: int
    S: int
    kind: str
    head_dim: int
    dtype: str
    heads: tuple[int, int]
    features: tuple[str, ...] = ()

    def __str__(self):
        sizes = f"{self.T}x{self.S}-H{self.head_dim}-N{self.heads[0]}-K{self.heads[1]}"
        return "-".join([self.kind, *self.features, sizes, self.dtype])

    @property
    def batch(self):
        return 1 if self.T * self.S > 2**20 else 2

    @property
    def cap(self):
        return 3.0 if "cap" in self.features else None

    @functools.cached_property
    def masks(self):
        B, T, S = self.batch, self.T, self.S
        masks = options(self.kind, B, T, S)
        random = np.random.default_rng(T * S)
        sizes = {"query_segment_ids": T, "key_value_segment_ids": S}
        for feature in {"packed", "scattered"} & set(self.features):
            # Id 0 only queries have, the last one only keys.
            low = {"query_segment_ids": 0, "key_value_segment_ids": 1}
            for name, size in sizes.items():
                ids = random.integers(low[name], low[name] + 5, (B, size), np.int32)
                masks[name] = np.sort(ids) if feature == "packed" else ids
        return masks


def cases():
    """Every pair of T and S; the other properties take turns, each coprime to the next."""
    for index, (T, S) in enumerate(itertools.product(LENGTHS, LENGTHS)):
        large = T * S > 2**20
        for turn in range(1 if large else 2):
            kind = KINDS[(index + 3 * turn) % len(KINDS)]
            head_dim = HEAD_DIMS[(index + turn) % len(HEAD_DIMS)]
            dtype = ("bf16", "f16")[(index // 2 + turn) % 2]
            heads = (2, 1) if large else HEADS[(index + turn) % len(HEADS)]
            yield Case(T, S, kind, head_dim, dtype, heads)


FEATURES = (
    ("packed",),
    ("cap",),
    ("sinks",),
    ("scattered",),
    ("packed", "cap"),
    ("packed", "sinks"),
    ("scattered", "cap", "sinks"),
)
PAIRS = ((64, 64), (129, 250), (250, 129), (1, 300), (513, 700), (1000, 1024), (300, 1))


def feature_cases():
    """Every feature with every kind of mask; the rest takes turns."""
    for index, (features, kind) in enumerate(itertools.product(FEATURES, KINDS)):
        T, S = PAIRS[index % len(PAIRS)]
        head_dim, heads = HEAD_DIMS[index // 2 % len(HEAD_DIMS)], HEADS[index % len(HEADS)]
        yield Case(T, S, kind, head_dim, ("bf16", "f16")[index % 2], heads, features)
    for features in FEATURES:
        yield Case(2048, 2100, "causal", 128, "bf16", (2, 1), features)


def problem(T, S, head_dim, dtype, heads, B=2, seed=0):
    """Operands query, key, value by name, and the cotangents of out and lse."""
    rng = np.random.default_rng(seed + T * 10007 + S)
    N, K = heads

    def normal(*shape):
        return rng.normal(size=shape).astype(DTYPES[dtype])

    operands = {
        "query": normal(B, T, N, head_dim),
        "key": normal(B, S, K, head_dim),
        "value": normal(B, S, K, head_dim),
    }
    return operands, (normal(B, T, N, head_dim), rng.normal(size=(B, T, N)).astype(np.float32))


def differentiated(attention, operands, cotangents):
    """out, lse and the gradients of all operands by name, in one compilation."""

    @jax.jit
    def run(operands, cotangents):
        results, pullback = jax.vjp(lambda operands: attention(**operands), operands)
        return *results, pullback(cotangents)[0]

    return run(jax.tree.map(jnp.asarray, operands), cotangents)


def run(operands, cotangents, implementation="fa4", **keywords):
    attention = functools.partial(
        fa4_jax.dot_product_attention,
        implementation=implementation,
        return_residual=True,
        **keywords,
    )
    return differentiated(attention, operands, cotangents)


def dense(visible, cap, query, key, value, scale=None, sinks=None):
    """Attention as written on paper in the operands' dtype; returns out and lse."""
    dtype, groups = query.dtype, query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale.astype(dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    sees = visible.any(-1, keepdims=True)
    peak = jnp.where(visible, logits, -jnp.inf).max(-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None, None]
        peak = jnp.maximum(peak, sinks)
    peak = jax.lax.stop_gradient(jnp.where(sees, peak, 0))
    # What is not selected must have finite derivatives too.
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - peak, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(jnp.minimum(sinks - peak, 0))
    total = jnp.where(sees, total, 1)
    out = jnp.einsum("bnts,bsnh->btnh", weights / total, value)
    lse = jnp.where(sees, peak + jnp.log(total), -jnp.inf)[..., 0].astype(jnp.float32)
    return out, jnp.moveaxis(lse, 1, 2)


def references(operands, cotangents, masks, cap=None):
    """Exact results and those in the operands' dtype: out, lse, gradients by name."""
    B, T, N, _ = operands["query"].shape
    S = operands["key"].shape[1]
    if B * N * T * S <= ORACLE_SCORES:
        for rounding in (None, operands["query"].dtype):
            found = oracle.Attention(
                **operands, logits_soft_cap=cap, masks=masks, rounding=rounding
            )
            yield found.out, found.lse, found.gradients(*cotangents)
        return
    wide = [jax.tree.map(lambda x: x.astype(np.float32), x) for x in (operands, cotangents)]
    yield jax.device_get(run(*wide, "xla", logits_soft_cap=cap, **masks))
    visible = jnp.asarray(oracle.visible_keys((B, 1, T, S), **masks))
    attention = functools.partial(dense, visible, cap)
    yield jax.device_get(differentiated(attention, operands, cotangents))


def check(found, exact, rounded, slacks=types.MappingProxyType({})):
    oracle.assert_accurate("out", found[0], np.asarray(exact[0], np.float64), rounded[0])
    oracle.assert_accurate("lse", found[1], exact[1], exact[1], slack=2e-4)
    for name, gradient in found[2].items():
        reference, coarse = (np.asarray(x[2][name], np.float64) for x in (exact, rounded))
        oracle.assert_accurate(f"d{name}", gradient, reference, coarse, slacks.get(name, 1e-5))


@pytest.mark.parametrize("case", [*cases(), *feature_cases()], ids=str)
def test_accuracy(case):
    sizes = case.T, case.S, case.head_dim, case.dtype, case.heads, case.batch
    operands, cotangents = problem(*sizes, seed=zlib.crc32(str(case).encode()))
    if case.features:
        operands["scale"] = np.float32(0.15)
    if "cap" in case.features:
        operands["query"] *= 4
    if "sinks" in case.features:
        operands["sinks"] = np.linspace(-2, 4, case.heads[0], dtype=np.float32)
    found = run(operands, cotangents, logits_soft_cap=case.cap, **case.masks)
    exact, rounded = references(operands, cotangents, case.masks, case.cap)
    slacks = {}
    if case.features:
        slacks["scale"] = oracle.slack_of_scale(operands, exact[2]["query"])
    if "sinks" in case.features:
        slacks["sinks"] = oracle.slack_of_sinks(operands, *exact[:2], cotangents[0])
    check(found, exact, rounded, slacks)


def test_ten_forwards_are_bit_equal():
    for kind, head_dim, dtype in (
        ("full", 128, "bf16"),
        ("causal", 64, "f16"),
        ("lengths", 96, "bf16"),
    ):
        operands, _ = problem(513, 700, head_dim, dtype, (8, 2))
        attention = jax.jit(
            functools.partial(
                fa4_jax.dot_product_attention,
                implementation="fa4",
                return_residual=True,
                **options(kind, 2, 513, 700),
            )
        )
        first = [np.asarray(x).tobytes() for x in attention(**operands)]
        for _ in range(9):
            assert [np.asarray(x).tobytes() for x in attention(**operands)] == first


def test_dk_and_dv_are_bit_equal_too():
    operands, cotangents = problem(513, 700, 128, "bf16", (8, 2))
    compute = functools.partial(run, operands, cotangents, is_causal=True)
    first, *others = (compute()[2] for _ in range(5))
    for other in others:
        for name in ("key", "value"):
            assert np.asarray(other[name]).tobytes() == np.asarray(first[name]).tobytes()


@pytest.mark.parametrize("value_dim", [40, 128])
def test_value_head_dim_of_its_own(value_dim):
    rng = np.random.default_rng(value_dim)
    operands, (_, dlse) = problem(150, 150, 72, "bf16", (4, 4))
    operands["value"], dout = (
        rng.normal(size=(2, 150, 4, value_dim)).astype(DTYPES["bf16"]) for _ in range(2)
    )
    found = run(operands, (dout, dlse), is_causal=True)
    check(found, *references(operands, (dout, dlse), {"is_causal": True}))


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-8, 3.0])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_scales(scale, cap):
    operands, cotangents = problem(200, 130, 64, "bf16", (4, 2))
    found = run(operands, cotangents, scale=scale, logits_soft_cap=cap, is_causal=True)
    scaled = operands | {"scale": scale}
    check(found, *references(scaled, cotangents, {"is_causal": True}, cap))


@pytest.mark.parametrize("has_segments", [False, True])
def test_padding_is_never_read(has_segments):
    """NaN and Inf where nobody looks, in every operand and in the cotangent, change no bit."""
    T, S = 200, 300
    masks = {
        "is_causal": True,
        "query_seq_lengths": np.int32([130, 0]),
        "key_value_seq_lengths": np.int32([77, 300]),
    }
    if has_segments:
        masks["query_seq_lengths"][1] = 150
        random = np.random.default_rng(0)
        masks["query_segment_ids"] = np.sort(random.integers(0, 6, (2, T), np.int32))
        masks["key_value_segment_ids"] = random.integers(3, 9, (2, S), np.int32)
    operands, (dout, _) = problem(T, S, 128, "bf16", (4, 2))
    dlse = np.zeros(dout.shape[:3], np.float32)
    visible = oracle.visible_keys((2, 1, T, S), **masks)[:, 0]
    queries, keys = visible.any(2), visible.any(1)

    def poisoned(name, x):
        x = x.copy()
        x[~(keys if name in ("key", "value") else queries)] = np.inf if name == "key" else np.nan
        return x

    clean = run(operands, (dout, dlse), **masks)
    dirty = {name: poisoned(name, x) for name, x in operands.items()}
    dirty = run(dirty, (poisoned("dout", dout), dlse), **masks)
    assert not any(np.isnan(np.asarray(x, np.float32)).any() for x in jax.tree.leaves(dirty))
    # Added in varying order.
    x, y = (np.asarray(results[2].pop("query"), np.float64) for results in (clean, dirty))
    np.testing.assert_allclose(y, x, rtol=2**-7, atol=2**-8 * np.abs(x).max())
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_default_choice_on_a_gpu_is_the_kernels():
    operands, _ = problem(64, 64, 64, "bf16", (2, 2))
    text = jax.jit(fa4_jax.dot_product_attention).lower(**operands).as_text()
    assert "fa4_jax.forward.v1" in text


def test_command_buffers_see_new_values_every_call():
    query, key, value = problem(128, 128, 64, "bf16", (2, 2))[0].values()

    @jax.jit
    def layers(query, key, value):
        def layer(carry, _):
            return fa4_jax.dot_product_attention(carry, key, value, implementation="fa4"), None

        return jax.lax.scan(layer, query, None, length=6)[0]

    def one_by_one(x):
        for _ in range(6):
            x = fa4_jax.dot_product_attention(x, key, value, implementation="fa4")
        return x

    for shift in range(5):
        operand = jnp.asarray(query) * (1 + shift)
        actual, expected = layers(operand, key, value), one_by_one(operand)
        np.testing.assert_array_equal(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        )
