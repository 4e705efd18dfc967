"""The kernels on a real GPU against the float64 oracle: out, lse, dq, dk and dv, one by one."""

import functools
import itertools

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


def cases():
    """Every pair of T and S; the other properties take turns, each coprime to the next."""
    for index, (T, S) in enumerate(itertools.product(LENGTHS, LENGTHS)):
        large = T * S > 2**20
        for turn in range(1 if large else 2):
            kind = KINDS[(index + 3 * turn) % len(KINDS)]
            head_dim = HEAD_DIMS[(index + turn) % len(HEAD_DIMS)]
            dtype = ("bf16", "f16")[(index // 2 + turn) % 2]
            heads = (2, 1) if large else HEADS[(index + turn) % len(HEADS)]
            yield T, S, kind, head_dim, dtype, heads


def run(query, key, value, dout, dlse, **keywords):
    attention = functools.partial(
        fa4_jax.dot_product_attention, implementation="fa4", return_residual=True, **keywords
    )

    @jax.jit
    def forward_and_backward(query, key, value, dout, dlse):
        (out, lse), pullback = jax.vjp(attention, query, key, value)
        return out, lse, *pullback((dout, dlse))

    return forward_and_backward(query, key, value, dout, dlse)


def problem(T, S, head_dim, dtype, heads, B=2, seed=0):
    rng = np.random.default_rng(seed + T * 10007 + S)
    N, K = heads

    def normal(*shape):
        return rng.normal(size=shape).astype(DTYPES[dtype])

    return (
        normal(B, T, N, head_dim),
        normal(B, S, K, head_dim),
        normal(B, S, K, head_dim),
        normal(B, T, N, head_dim),
        rng.normal(size=(B, T, N)).astype(np.float32),
    )


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_accuracy(index):
    for T, S, kind, head_dim, dtype, heads in cases():
        if LENGTHS.index(T) != index:
            continue
        B = 1 if T * S > 2**20 else 2
        operands = problem(T, S, head_dim, dtype, heads, B)
        keywords = options(kind, B, T, S)
        out, lse, *gradients = run(*operands, **keywords)
        query, key, value, dout, dlse = operands
        exact, rounded = (
            oracle.Attention(query, key, value, masks=keywords, rounding=rounding)
            for rounding in (None, DTYPES[dtype])
        )
        label = f"T={T} S={S} {kind} H={head_dim} {dtype} heads={heads}"
        oracle.assert_accurate(f"out {label}", out, exact.out, rounded.out)
        oracle.assert_accurate(f"lse {label}", lse, exact.lse, exact.lse, slack=2e-4)
        expected, coarse = (x.gradients(dout, dlse) for x in (exact, rounded))
        for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
            oracle.assert_accurate(f"d{name} {label}", gradient, expected[name], coarse[name])


def test_ten_forwards_are_bit_equal():
    for kind, head_dim, dtype in (
        ("full", 128, "bf16"),
        ("causal", 64, "f16"),
        ("lengths", 96, "bf16"),
    ):
        query, key, value, _, _ = problem(513, 700, head_dim, dtype, (8, 2))
        attention = jax.jit(
            functools.partial(
                fa4_jax.dot_product_attention,
                implementation="fa4",
                return_residual=True,
                **options(kind, 2, 513, 700),
            )
        )
        first = [np.asarray(x).tobytes() for x in attention(query, key, value)]
        for _ in range(9):
            assert [np.asarray(x).tobytes() for x in attention(query, key, value)] == first


def test_dk_and_dv_are_bit_equal_too():
    operands = problem(513, 700, 128, "bf16", (8, 2))
    first, *others = (run(*operands, is_causal=True) for _ in range(5))
    for other in others:
        for x, y in zip(other[3:], first[3:], strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("value_dim", [40, 128])
def test_value_head_dim_of_its_own(value_dim):
    rng = np.random.default_rng(value_dim)
    query, key = (rng.normal(size=(2, 150, 4, 72)).astype(DTYPES["bf16"]) for _ in range(2))
    value, dout = (rng.normal(size=(2, 150, 4, value_dim)).astype(DTYPES["bf16"]) for _ in range(2))
    dlse = rng.normal(size=(2, 150, 4)).astype(np.float32)
    out, _, *gradients = run(query, key, value, dout, dlse, is_causal=True)
    exact, rounded = (
        oracle.Attention(query, key, value, masks={"is_causal": True}, rounding=rounding)
        for rounding in (None, DTYPES["bf16"])
    )
    oracle.assert_accurate("out", out, exact.out, rounded.out)
    expected, coarse = (x.gradients(dout, dlse) for x in (exact, rounded))
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        oracle.assert_accurate(f"d{name}", gradient, expected[name], coarse[name])


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-8, 3.0])
def test_scales(scale):
    query, key, value, dout, dlse = problem(200, 130, 64, "bf16", (4, 2))
    out, _, *gradients = run(query, key, value, dout, dlse, scale=scale, is_causal=True)
    exact, rounded = (
        oracle.Attention(query, key, value, scale=scale, masks={"is_causal": True}, rounding=r)
        for r in (None, DTYPES["bf16"])
    )
    oracle.assert_accurate("out", out, exact.out, rounded.out)
    expected, coarse = (x.gradients(dout, dlse) for x in (exact, rounded))
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        oracle.assert_accurate(f"d{name}", gradient, expected[name], coarse[name])


def test_padding_is_never_read():
    """NaN and Inf past the lengths, in every operand and in the cotangent, change no bit."""
    T, S, lengths = 200, 300, {"query_seq_lengths": np.int32([130, 0]), "is_causal": True}
    lengths["key_value_seq_lengths"] = np.int32([77, 300])
    query, key, value, dout, dlse = problem(T, S, 128, "bf16", (4, 2))
    dlse = np.zeros_like(dlse)
    poisoned = [x.copy() for x in (query, key, value, dout)]
    for b in range(2):
        visible = min(lengths["key_value_seq_lengths"][b], lengths["query_seq_lengths"][b])
        for x in (poisoned[0], poisoned[3]):
            x[b, lengths["query_seq_lengths"][b] :] = np.nan
        poisoned[1][b, visible:] = np.inf
        poisoned[2][b, visible:] = np.nan
    clean = run(query, key, value, dout, dlse, **lengths)
    dirty = run(*poisoned[:3], poisoned[3], dlse, **lengths)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), clean, dirty, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert not np.isnan(y).any(), name
        if name == "dq":  # added in varying order
            np.testing.assert_allclose(y, x, rtol=2**-7, atol=2**-8 * np.abs(x).max())
        else:
            np.testing.assert_array_equal(y, x, err_msg=name)


def test_default_choice_on_a_gpu_is_the_kernels():
    query, key, value, _, _ = problem(64, 64, 64, "bf16", (2, 2))
    text = jax.jit(fa4_jax.dot_product_attention).lower(query, key, value).as_text()
    assert "fa4_jax.forward.v1" in text


def test_command_buffers_see_new_values_every_call():
    query, key, value, _, _ = problem(128, 128, 64, "bf16", (2, 2))

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
