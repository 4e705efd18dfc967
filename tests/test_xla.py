"""`fa4_jax.xla` against the float64 oracle: values, gradients, transforms, memory, sharding."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import dot_product_attention, xla
from fa4_jax.spec import AttentionSpec, Operands

attend = functools.partial(dot_product_attention, implementation="xla")
FLOATS = ("query", "key", "value", "bias", "sinks", "scale")

# What is computed: options of the call, and shapes. B=2, T=37, S=53 and N=4 unless said otherwise;
# sizes that no tile divides. "bias" and "mask" give shapes.
CASES = {
    "plain": {},
    "causal_bf16": {"dtype": "bfloat16", "is_causal": True, "kv_heads": 2},
    "causal_wide_f16": {"dtype": "float16", "is_causal": True, "T": 53, "S": 37, "value_dim": 24},
    "window_offset": {"local_window_size": (9, 4), "query_offset": [5, -11], "kv_heads": 1},
    "left_window_causal": {"local_window_size": (20, None), "is_causal": True, "dtype": "bfloat16"},
    "lengths": {"query_seq_lengths": [30, 0], "key_value_seq_lengths": [41, 60], "kv_heads": 2},
    "kv_lengths_causal_f16": {
        "dtype": "float16",
        "is_causal": True,
        "key_value_seq_lengths": [0, 17],
        "bias": (2, 4, 37, 53),
    },
    "segments_sinks": {"segments": True, "sinks": True, "is_causal": True, "query_offset": 3},
    "bias_full_cap": {
        "bias": (2, 4, 37, 53),
        "logits_soft_cap": 3.0,
        "kv_heads": 2,
        "traced_scale": 0.4,
    },
    "bias_per_head_mask": {
        "bias": (4, 37, 53),
        "mask": (2, 1, 37, 53),
        "dtype": "bfloat16",
        "sinks": True,
    },
    "bias_per_batch": {"bias": (2, 1, 37, 53), "mask": (1, 4, 37, 1), "kv_heads": 2},
    "bias_per_key": {"bias": (1, 4, 1, 53), "mask": (53,), "dtype": "bfloat16", "kv_heads": 2},
    "bias_per_row": {
        "bias": (1, 1, 37, 1),
        "mask": (37, 53),
        "traced_scale": -0.3,
        "is_causal": True,
    },
    "bias_scalar": {
        "bias": (),
        "logits_soft_cap": 5.0,
        "query_seq_lengths": [37, 20],
        "sinks": True,
    },
    "everything_bf16": {
        "dtype": "bfloat16",
        "bias": (1, 4, 37, 53),
        "mask": (2, 4, 37, 53),
        "segments": True,
        "sinks": True,
        "logits_soft_cap": 4.0,
        "local_window_size": (25, 12),
        "query_offset": [4, 9],
        "query_seq_lengths": [33, 37],
        "key_value_seq_lengths": [50, 44],
        "kv_heads": 2,
        "value_dim": 24,
        "traced_scale": 0.25,
    },
}


def make(case, seed=0, B=2, T=37, S=53, N=4, H=16):
    """Returns the float arrays, and the other keyword arguments, of a case."""
    case = dict(case)
    rng = np.random.default_rng(seed)
    T, S = case.pop("T", T), case.pop("S", S)
    kv_heads, value_dim = case.pop("kv_heads", N), case.pop("value_dim", H)
    dtype = jnp.dtype(case.pop("dtype", "float32"))
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    floats = {
        "query": normal(B, T, N, H),
        "key": normal(B, S, kv_heads, H),
        "value": normal(B, S, kv_heads, value_dim),
    }
    if "bias" in case:
        floats["bias"] = np.asarray(normal(*case.pop("bias")))
    if case.pop("sinks", False):
        floats["sinks"] = normal(N)
    if "traced_scale" in case:
        floats["scale"] = np.float32(case.pop("traced_scale"))
    if "mask" in case:
        case["mask"] = rng.random(case["mask"]) < 0.7
    if case.pop("segments", False):
        case["query_segment_ids"] = np.sort(rng.integers(0, 3, (B, T)), axis=1)
        case["key_value_segment_ids"] = np.sort(rng.integers(0, 3, (B, S)), axis=1)
    return floats, case


def reference(floats, options, rounding=None):
    masks = dict(options)
    cap = masks.pop("logits_soft_cap", None)
    return oracle.Attention(**floats, logits_soft_cap=cap, masks=masks, rounding=rounding)


def weights(ref, seed=1, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.normal(size=ref.out.shape).astype(dtype), rng.normal(size=ref.lse.shape).astype(
        np.float32
    )


def value_and_gradients(options, floats, w, wl):
    """(out, lse) and the gradients of every float argument, in one compilation."""

    @jax.jit
    def run(floats, w, wl):
        def call(floats):
            return attend(**floats, **options, return_residual=True)

        (out, lse), pull = jax.vjp(call, jax.tree.map(jnp.asarray, floats))
        # Rows without keys have residual -inf: its cotangent must not matter.
        return (out, lse), pull((w.astype(out.dtype), wl))[0]

    return run(floats, w, wl)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, tiling):
    floats, options = make(CASES[name])
    dtype = floats["query"].dtype
    exact = reference(floats, options)
    rounded = reference(floats, options, rounding=dtype)
    w, wl = weights(exact, dtype=dtype)
    (out, lse), gradients = value_and_gradients(options, floats, w, wl)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    oracle.assert_accurate("out", out, exact.out, rounded.out)
    oracle.assert_accurate("lse", lse, exact.lse, exact.lse)
    want, coarse = exact.gradients(w, wl), rounded.gradients(w, wl)
    for argument, gradient in gradients.items():
        assert gradient.dtype == floats[argument].dtype, argument
        oracle.assert_accurate(
            argument,
            gradient,
            want[argument],
            coarse[argument],
            slack=1e-5 * max(1, np.abs(want[argument]).max()),
        )
        # A wrong gradient would not have passed.
        for mutant in (0 * gradient, -gradient, 1.5 * gradient):
            with pytest.raises(AssertionError):
                oracle.assert_accurate(argument, mutant, want[argument], coarse[argument])


def test_without_promotion_of_ranks_or_dtypes(tiling):
    floats, options = make(CASES["everything_bf16"])
    w, wl = weights(reference(floats, options), dtype=jnp.bfloat16)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        value_and_gradients(options, floats, w, wl)


def test_oracle_gradients_are_the_derivatives_of_its_values():
    floats, options = make(CASES["everything_bf16"])
    floats = {name: np.asarray(x, np.float64) for name, x in floats.items()}
    ref = reference(floats, options)
    w, wl = weights(ref, dtype=np.float64)
    finite = np.isfinite(ref.lse)

    def loss(floats):
        ref = reference(floats, options)
        return (w * ref.out).sum() + np.where(finite, wl * ref.lse, 0)[finite].sum()

    gradients = ref.gradients(w, np.where(finite, wl, 0))
    rng = np.random.default_rng(5)
    for name, x in floats.items():
        step = 1e-5 * rng.normal(size=x.shape)
        difference = loss({**floats, name: x + step}) - loss({**floats, name: x - step})
        np.testing.assert_allclose(
            difference / 2, (gradients[name] * step).sum(), rtol=1e-6, atol=1e-11, err_msg=name
        )


def test_oracle_agrees_with_jax_nn():
    floats, options = make({"is_causal": True, "kv_heads": 2, "bias": (1, 4, 37, 53)})
    ref = reference(floats, options)
    expected = jax.nn.dot_product_attention(**floats, **options)
    np.testing.assert_allclose(ref.out, expected, atol=1e-5)


# --- Derivatives of other modes and orders --------------------------------------------------------

ALL_ARGUMENTS = {
    "bias": (4, 1, 13),
    "sinks": True,
    "traced_scale": 0.4,
    "logits_soft_cap": 3.0,
    "is_causal": True,
    "query_seq_lengths": [8, 11],
    "kv_heads": 2,
    "T": 11,
    "S": 13,
}


def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "_TILE_MAX", 4)
    monkeypatch.setattr(xla, "_TILE_MIN", 4)


def test_forward_mode_and_second_order(tiling, monkeypatch):
    small_tiles(monkeypatch)
    floats, options = make(ALL_ARGUMENTS, H=4)
    floats = {name: np.asarray(x, np.float64) for name, x in floats.items()}
    rng = np.random.default_rng(7)
    direction = {name: rng.normal(size=x.shape) for name, x in floats.items()}
    ref = reference(floats, options)
    w, wl = weights(ref, dtype=np.float64)
    wl = np.where(np.isfinite(ref.lse), wl, 0)

    def at(step):
        return reference({n: floats[n] + step * direction[n] for n in floats}, options)

    step = 1e-5
    ahead, behind = at(step), at(-step)
    out_dot = (ahead.out - behind.out) / (2 * step)
    lse_dot = np.where(np.isfinite(ref.lse), ahead.lse, 0) - np.where(
        np.isfinite(ref.lse), behind.lse, 0
    )
    grad_ahead, grad_behind = ahead.gradients(w, wl), behind.gradients(w, wl)
    hessian = {n: (grad_ahead[n] - grad_behind[n]) / (2 * step) for n in floats}

    with jax.enable_x64(True):

        def call(floats):
            return attend(**floats, **options, return_residual=True)

        def loss(floats):
            out, lse = call(floats)
            return (w * out).sum() + (wl * jnp.where(jnp.isfinite(lse), lse, 0)).sum()

        gradient = jax.grad(loss)
        inner = lambda x: sum(  # noqa: E731
            jnp.vdot(g, direction[n]) for n, g in gradient(x).items()
        )
        arrays = jax.tree.map(jnp.asarray, floats)
        tangents = jax.jit(lambda x, t: jax.jvp(call, (x,), (t,))[1])(arrays, direction)
        forward_over_reverse = jax.jit(lambda x, t: jax.jvp(gradient, (x,), (t,))[1])
        reverse_over_reverse = jax.jit(jax.grad(inner))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
        assert tangents[1].dtype == jnp.float64
        close(tangents[0], out_dot)
        close(tangents[1], lse_dot / (2 * step))
        for found in (forward_over_reverse(arrays, direction), reverse_over_reverse(arrays)):
            for name in floats:
                close(found[name], hessian[name], err_msg=name)


def test_jacobians_agree_between_modes(tiling, monkeypatch):
    small_tiles(monkeypatch)
    floats, options = make({"T": 6, "S": 7, "is_causal": True}, B=1, N=2, H=3)
    q, k, v = (jnp.asarray(floats[n]) for n in ("query", "key", "value"))
    call = functools.partial(attend, **options)
    forward = jax.jit(jax.jacfwd(call, (0, 1, 2)))(q, k, v)
    reverse = jax.jit(jax.jacrev(call, (0, 1, 2)))(q, k, v)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), forward, reverse)


def test_the_two_halves(tiling):
    """`forward` and `backward`, which `fa4.py` falls back to, give what `attend` and its vjp do."""
    floats, options = make(
        {"kv_heads": 2, "traced_scale": 0.3, "sinks": True, "bias": (1, 4, 37, 53)}
    )
    lengths = jnp.array([30, 0], jnp.int32)
    spec = AttentionSpec(left=20, right=0)

    @jax.jit
    def both(floats, w, wl):
        def whole(floats):
            return xla.attend(spec, Operands(**floats, query_seq_lengths=lengths))

        results, pull = jax.vjp(whole, floats)
        operands = Operands(**floats, query_seq_lengths=lengths)
        halves = xla.forward(spec, operands)
        gradients = xla.backward(spec, operands, *halves, w, wl)
        without = xla.backward(spec, operands, *halves, w)
        return (results, pull((w, wl))[0]), (halves, gradients), (pull((w, 0 * wl))[0], without)

    ref = reference(floats, dict(options, query_seq_lengths=[30, 0]))
    arrays = jax.tree.map(jnp.asarray, floats)
    (results, want), (halves, got), (want_without, without) = both(arrays, *weights(ref))
    close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-5)
    jax.tree.map(close, halves, results)
    for name in floats:
        close(getattr(got, name), want[name], err_msg=name)
        close(getattr(without, name), want_without[name], err_msg=name)
    assert got.mask is None


# --- Padding, masked rows, large numbers ----------------------------------------------------------


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_rubbish_in_padding_reaches_nothing(rubbish, tiling):
    """Lengths, a window, segments, a mask and bias = -inf: each hides its own rows and keys."""
    rng = np.random.default_rng(2)
    B, T, S, N, H = 5, 20, 40, 2, 8
    q, k, v, w = (
        rng.normal(size=s).astype(np.float32)
        for s in ((B, T, N, H), (B, S, N, H), (B, S, N, H), (B, T, N, H))
    )
    query_ids, key_ids = np.zeros((B, T), np.int32), np.zeros((B, S), np.int32)
    key_ids[2, 30:] = 7
    mask, bias = np.ones((B, 1, T, S), bool), np.zeros((B, 1, T, S), np.float32)
    mask[3, :, :, 33:] = False
    bias[4, :, :, 31:] = -np.inf
    options = {
        "mask": mask,
        "query_segment_ids": query_ids,
        "key_value_segment_ids": key_ids,
        "key_value_seq_lengths": np.array([23, S, S, S, S]),
        "query_seq_lengths": np.array([13, T, T, T, T]),
        "query_offset": np.array([20, 0, 20, 20, 20]),  # of batch 1 the last query sees key 22
        "local_window_size": (None, 3),
    }
    hidden = np.zeros((B, S), bool)
    for b, first in enumerate((23, 23, 30, 33, 31)):
        hidden[b, first:] = True
    dirty = [np.where(hidden[..., None, None], rubbish, x).astype(np.float32) for x in (k, v)]
    clean = [np.where(hidden[..., None, None], 0, x).astype(np.float32) for x in (k, v)]
    row = np.arange(T)[None, :, None, None] >= np.array([13, T, T, T, T])[:, None, None, None]
    dirty_q, dirty_w = (np.where(row, rubbish, x).astype(np.float32) for x in (q, w))

    @jax.jit
    def run(q, k, v, bias, w):
        out, pull = jax.vjp(lambda *x: attend(*x, **options), q, k, v, bias)
        return out, pull(w)

    want = run(np.where(row, 0, q), *clean, bias, np.where(row, 0, w))
    got = run(dirty_q, *dirty, bias, dirty_w)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("by", ["causal", "segments", "bias"])
def test_rows_that_fill_up_a_tile_see_no_rubbish(by, tiling):
    """Their position, their id (0) and their bias (0) would let them see what no query sees."""
    rng = np.random.default_rng(2)
    T, S = 20, 40
    q = rng.normal(size=(1, T, 1, 8)).astype(np.float32)
    k, v = (rng.normal(size=(1, S, 1, 8)).astype(np.float32) for _ in range(2))
    hidden = np.arange(S) >= T
    options = {
        "causal": {"is_causal": True},
        "segments": {
            "query_segment_ids": np.ones((1, T), int),
            "key_value_segment_ids": np.where(hidden, 0, 1)[None],
        },
        "bias": {"bias": np.tile(np.where(hidden, -np.inf, 0).astype(np.float32), (T, 1))},
    }[by]

    @jax.jit
    def run(k, v):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, **options), q, k, v)
        return out, pull(jnp.ones_like(out))

    clean, dirty = ([np.where(hidden[:, None, None], y, x) for x in (k, v)] for y in (0, np.nan))
    jax.tree.map(np.testing.assert_array_equal, run(*dirty), run(*clean))


@pytest.mark.parametrize("by", ["mask", "bias"])
def test_a_row_without_keys(by, tiling):
    """Output 0, residual -inf and no gradient, whatever its cotangents, sinks included."""
    floats, _ = make({"sinks": True, "T": 20, "S": 20})
    q, k, v, sinks = (jnp.asarray(floats[n]) for n in ("query", "key", "value", "sinks"))
    keep = np.ones((2, 1, 20, 20), bool)
    keep[0, :, 5] = False
    option = {"mask": keep} if by == "mask" else {"bias": np.where(keep, 0, -np.inf)}

    @jax.jit
    def run(w, wl):
        call = functools.partial(attend, return_residual=True, **option)
        (out, lse), pull = jax.vjp(lambda q, k, v, s: call(q, k, v, sinks=s), q, k, v, sinks)
        return out, lse, pull((w, wl))

    w, wl = np.ones(q.shape, np.float32), np.ones((2, 20, 4), np.float32)
    out, lse, gradients = run(w, wl)
    np.testing.assert_array_equal(out[0, 5], 0)
    np.testing.assert_array_equal(lse[0, 5], -np.inf)
    assert np.isfinite(np.delete(lse[0], 5, axis=0)).all()
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0][0, 5], 0)
    w[0, 5], wl[0, 5] = np.nan, np.inf
    jax.tree.map(np.testing.assert_array_equal, run(w, wl)[2], gradients)


@pytest.mark.parametrize("magnitude", [1e6, 1e30])
def test_gradients_survive_large_logits(magnitude, tiling):
    """Probabilities are recomputed exactly even where one float32 cannot hold max + log(sum)."""
    rng = np.random.default_rng(4)
    q, v, w = (rng.normal(size=(1, 20, 1, 4)).astype(np.float32) for _ in range(3))
    k = np.zeros_like(q)
    bias = np.float32(-magnitude)

    @jax.jit
    def run(q, v, w):
        out, pull = jax.vjp(
            lambda q, v: attend(q, k, v, bias, sinks=np.float32([-magnitude])), q, v
        )
        return out, pull(w)[1]

    out, dv = run(q, v, w)
    np.testing.assert_allclose(out, np.broadcast_to(v.sum(1) / 21, out.shape), rtol=1e-5)
    np.testing.assert_allclose(dv, np.broadcast_to(w.sum(1) / 21, dv.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(B, T, S):
    q, k, v = jnp.ones((B, T, 4, 8)), jnp.ones((B, S, 2, 8)), jnp.ones((B, S, 2, 6))

    @jax.jit
    def run(q, k, v, sinks):
        call = functools.partial(attend, is_causal=True, return_residual=True)
        (out, lse), pull = jax.vjp(lambda q, k, v, s: call(q, k, v, sinks=s), q, k, v, sinks)
        return out, lse, *pull((jnp.ones_like(out), jnp.ones_like(lse)))

    out, lse, *gradients = run(q, k, v, jnp.ones(4))
    assert out.shape == (B, T, 4, 6)
    assert lse.shape == (B, T, 4)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, (4,)]
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    assert all((g == 0).all() for g in gradients)


def test_float32_is_computed_in_float32_accuracy():
    """The highest matmul precision is in the program, whatever backend runs it."""
    x = jnp.ones((1, 8, 1, 8))
    text = jax.jit(jax.grad(lambda x: attend(x, x, x).sum())).lower(x).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots
    assert all("HIGHEST" in line for line in dots)


# --- Memory ---------------------------------------------------------------------------------------

LONG = 32_768


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (500, 100)}])
def test_memory_is_linear(options):
    def gradients(q, k, v):
        loss = lambda *x: jnp.square(attend(*x, **options)).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        return jax.jit(gradients).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    long = temporaries(LONG)
    assert long < 2**28  # 1/16 of what one score matrix would take
    assert long < 2.5 * temporaries(LONG // 2)


def test_peak_memory_at_32k():
    """T = S = 32,768 forwards and backwards in a process of its own, under 2 GiB all told."""
    script = f"""
import resource, jax, jax.numpy as jnp, fa4_jax
x = jnp.ones(({LONG}, 1, 64), jnp.bfloat16)
loss = lambda *x: fa4_jax.dot_product_attention(
    *x, local_window_size=(2000, 0), implementation="xla").astype(jnp.float32).sum()
out, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, x, x)
assert abs(out / {LONG * 64} - 1) < 1e-2
print(jax.block_until_ready(gradients)[0].shape, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) * 1024 < 2**31


def test_tiles_that_no_query_needs_are_not_computed(monkeypatch):
    """Counted at run time: causal takes little more than half of the tiles, a window its band."""
    visited = []
    original = xla._visible

    def counting(call, i, j, tile):
        jax.debug.callback(lambda i, j: visited.append((int(i), int(j))), i, j)
        return original(call, i, j, tile)

    monkeypatch.setattr(xla, "_visible", counting)
    for name, value in (("_SINGLE_TILE_SCORES", 0), ("_TILE_MAX", 16), ("_TILE_MIN", 16)):
        monkeypatch.setattr(xla, name, value)
    x = jnp.ones((1, 128, 1, 8))
    for options, expected in (
        ({}, 64),
        ({"is_causal": True}, 36),
        ({"local_window_size": (16, 0)}, 8 + 7),
    ):
        visited.clear()
        jax.block_until_ready(jax.jit(functools.partial(attend, **options))(x, x, x))
        jax.effects_barrier()
        assert len(set(visited)) == expected, options


# --- Transforms -----------------------------------------------------------------------------------


def close(actual, expected, atol=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), actual, expected)


def qkv(B=4, T=24, S=24, N=8, K=4, H=8, seed=3):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def test_vmap_over_any_array(tiling):
    q, k, v = qkv(B=2)
    rng = np.random.default_rng(0)
    arrays = {
        "query": q,
        "key": k,
        "value": v,
        "bias": jnp.asarray(rng.normal(size=(8, 24, 24)), jnp.float32),
        "mask": jnp.asarray(rng.random((2, 1, 24, 24)) < 0.8),
        "sinks": jnp.asarray(rng.normal(size=8), jnp.float32),
        "key_value_seq_lengths": jnp.array([20, 9]),
        "query_offset": jnp.array([3, 0]),
        "scale": jnp.float32(0.4),
    }

    def call(arrays):
        return attend(**arrays, is_causal=True)

    @jax.jit
    def compare(arrays):
        found, expected = {}, {}
        for name, x in arrays.items():
            other = ~x if x.dtype == bool else x + 1
            axes = {n: 0 if n == name else None for n in arrays}
            stacked = {**arrays, name: jnp.stack([x, other])}
            found[name] = jax.vmap(call, (axes,), out_axes=1)(stacked)
            expected[name] = jnp.stack([call(arrays), call({**arrays, name: other})], 1)
        return found, expected

    close(*compare(arrays))
    empty = jax.vmap(attend, (None, 0, None), 2)(q, jnp.zeros((0, *k.shape)), v)
    assert empty.shape == (*q.shape[:2], 0, *q.shape[2:])


def test_vmap_of_grad_and_nested(tiling):
    q, k, v = qkv(B=2)
    loss = lambda q, k, v: jnp.square(attend(q, k, v, is_causal=True)).sum()  # noqa: E731
    gradient = jax.grad(loss, (0, 1, 2))
    two = lambda x: jnp.stack([x, 2 * x])  # noqa: E731
    nested = jax.vmap(jax.vmap(gradient, (0, None, None)), (None, 0, None))
    found = jax.jit(nested)(two(q), two(k), v)
    for i, j in ((0, 1), (1, 0)):
        expected = jax.jit(gradient)((1 + j) * q, (1 + i) * k, v)
        close(tuple(x[i, j] for x in found), expected, atol=1e-4)


COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


@pytest.mark.parametrize(
    ("axis_type", "kv_heads"), [(AxisType.Auto, 4), (AxisType.Explicit, 4), (AxisType.Auto, 8)]
)
def test_sharding_over_batch_and_heads_needs_no_collective(axis_type, kv_heads, tiling):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    arrays = qkv(K=kv_heads)
    w = jnp.ones_like(arrays[0])
    bias = jnp.ones((1, 8, 24, 24))
    lengths = jnp.array([24, 20, 3, 0])

    def run(q, k, v, w, bias, lengths):
        call = functools.partial(attend, is_causal=True, key_value_seq_lengths=lengths)
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, bias), q, k, v)
        return out, pull(w)

    specs = [P("data", None, "model")] * 4 + [P(None, "model"), P("data")]
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((*arrays, w, bias, lengths), specs, strict=True)
        ]
        compiled = jax.jit(run).lower(*sharded).compile()
        found = compiled(*sharded)
    assert not re.findall(COLLECTIVES, compiled.as_text())
    for x in jax.tree.leaves(found):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), x.ndim)
    close(jax.device_get(found), jax.jit(run)(*arrays, w, bias, lengths))


@pytest.mark.parametrize(
    ("axis_type", "kv_heads", "spec"),
    [
        (AxisType.Auto, 2, P(None, None, "x")),
        (AxisType.Auto, 1, P(None, None, "x")),
        (AxisType.Explicit, 2, P(None, None, "x")),
        (AxisType.Explicit, 1, P(None, "x")),
        (AxisType.Explicit, 2, P(None, None, None, "x")),
    ],
)
def test_what_cannot_be_sharded_is_still_right(axis_type, kv_heads, spec):
    """More shards than kv heads; a sharded sequence; a sharded head dimension."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    arrays = qkv(B=1, K=kv_heads)

    def run(q, k, v, w):
        out, pull = jax.vjp(functools.partial(attend, is_causal=True), q, k, v)
        return out, pull(w)

    with jax.set_mesh(mesh):
        query = jax.device_put(arrays[0], NamedSharding(mesh, spec))
        rest = [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays[1:]]
        if spec == P(None, None, None, "x"):  # out has value's head dimension, which is whole
            weight = jax.device_put(arrays[0], NamedSharding(mesh, P()))
        else:
            weight = query
        found = jax.jit(run)(query, *rest, weight)
    close(jax.device_get(found), jax.jit(run)(*arrays, arrays[0]))


@pytest.mark.parametrize(
    ("check_vma", "tiling"), [(True, "tiled"), (False, "single_tile")], indirect=["tiling"]
)
def test_shard_map_inside_scan(check_vma, tiling):
    mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Auto,))
    arrays = qkv()

    def layers(q, k, v):
        return jax.lax.scan(lambda c, _: (attend(c, k, v, is_causal=True), None), q, None, 2)[0]

    sharded = jax.shard_map(
        layers, mesh=mesh, in_specs=P("b"), out_specs=P("b"), check_vma=check_vma
    )
    run = lambda f: jax.jit(  # noqa: E731
        jax.value_and_grad(lambda *x: jnp.square(f(*x)).sum(), (0, 1, 2))
    )
    close(run(sharded)(*arrays), run(layers)(*arrays), atol=1e-4)


def test_remat_runs_the_forward_pass_once(tiling):
    """With output and residual saved under their name, the backward pass has only its five dots."""
    arrays = qkv()
    policies = jax.checkpoint_policies

    def gradients(policy):
        block = functools.partial(attend, is_causal=True)
        if policy is not None:
            block = jax.checkpoint(block, policy=policy)
        return jax.jit(jax.grad(lambda *x: jnp.square(block(*x)).sum(), (0, 1, 2)))

    lowered = gradients(None).lower(*arrays)
    assert lowered.as_text().count("dot_general") == 7
    expected = lowered.compile()(*arrays)
    for policy, dots in (
        (policies.save_only_these_names("context"), 7),
        (policies.nothing_saveable, 9),
    ):
        lowered = gradients(policy).lower(*arrays)
        assert lowered.as_text().count("dot_general") == dots
        close(lowered.compile()(*arrays), expected, atol=1e-6)


def test_a_gradient_costs_only_what_it_needs():
    q, k, v = qkv()
    text = lambda argument: (  # noqa: E731
        jax.jit(jax.grad(lambda *x: attend(*x).sum(), argument)).lower(q, k, v).compile().as_text()
    )
    dots = lambda argument: len(re.findall(r"\bdot\(|dot_general|__onednn", text(argument)))  # noqa: E731
    assert dots(2) < dots(0) < dots((0, 1, 2))
