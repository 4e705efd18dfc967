"""The public function: wrong arguments, canonical forms, choice of implementation, export."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export

import fa4_jax
from fa4_jax import bundle, fa4, implementations

attend = functools.partial(fa4_jax.dot_product_attention, implementation="xla")

Q, K = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 5, 2, 8))


def like(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


# (keyword arguments beside query, key and value; what the message has to say)
WRONG = [
    ({"query": like(6, 4)}, ["query float32 [6, 4]", "3-D", "4-D"]),
    ({"key": like(5, 2, 8)}, ["key float32 [5, 2, 8]", "all be 3-D"]),
    ({"query": Q.astype(jnp.bfloat16)}, ["one dtype", "query bfloat16", "key float32"]),
    ({"value": K.astype(jnp.float16)}, ["one dtype", "value float16"]),
    (dict.fromkeys(("query", "key", "value"), Q.astype(int)), ["int32", "bfloat16, float32"]),
    ({"key": like(3, 5, 2, 8)}, ["key", "B = 2", "got B = 3"]),
    ({"key": like(2, 5, 2, 16)}, ["key", "H = 8", "got H = 16"]),
    ({"value": like(2, 4, 2, 8)}, ["value", "S = 5", "got S = 4"]),
    ({"value": like(2, 5, 4, 8)}, ["value", "K = 2", "got K = 4"]),
    ({"query": like(2, 6, 3, 8)}, ["multiple", "N = 3", "K = 2"]),
    ({"key": like(2, 5, 0, 8), "value": like(2, 5, 0, 8)}, ["K must be", "K = 0"]),
    ({"bias": like(3, 6, 5)}, ["bias", "[2, 4, 6, 5]", "float32 [3, 6, 5]"]),
    ({"bias": like(1, 2, 4, 6, 5)}, ["bias", "[2, 4, 6, 5]"]),
    ({"bias": np.ones((6, 5), bool)}, ["bias", "float dtype", "mask"]),
    ({"mask": like(6, 5)}, ["mask must be bool", "bias"]),
    ({"mask": np.ones((5, 6), bool)}, ["mask", "[2, 4, 6, 5]", "bool [5, 6]"]),
    ({"scale": like(2)}, ["scale", "scalar", "[2]"]),
    ({"scale": 1j}, ["scale", "real"]),
    ({"scale": float("nan")}, ["scale", "finite"]),
    ({"scale": 1e39}, ["scale", "finite in float32", "1e+39"]),
    ({"scale": True}, ["scale", "bool"]),
    ({"is_causal": 1}, ["is_causal", "True or False", "1"]),
    ({"is_causal": jnp.array(True)}, ["is_causal", "traced"]),
    ({"query_seq_lengths": jnp.ones(2)}, ["query_seq_lengths", "integer", "float32"]),
    ({"query_seq_lengths": 3}, ["query_seq_lengths", "[B] = [2]"]),
    ({"key_value_seq_lengths": [1, 2, 3]}, ["key_value_seq_lengths", "[B] = [2]", "[3]"]),
    ({"local_window_size": -1}, ["local_window_size", "negative", "-1"]),
    ({"local_window_size": (-1, 0)}, ["local_window_size", "(-1, 0)"]),
    ({"local_window_size": (1, 2, 3)}, ["local_window_size", "(1, 2, 3)"]),
    ({"local_window_size": 1.5}, ["local_window_size", "1.5"]),
    ({"query_segment_ids": np.ones((2, 6), int)}, ["query_segment_ids", "without key_value_seg"]),
    ({"key_value_segment_ids": np.ones((2, 5), int)}, ["key_value_segment_ids is given without"]),
    (
        {"query_segment_ids": np.ones((2, 5), int), "key_value_segment_ids": np.ones((2, 5), int)},
        ["query_segment_ids", "[B, T] = [2, 6]", "[2, 5]"],
    ),
    ({"query_offset": [1]}, ["query_offset", "[B] = [2]", "[1]"]),
    ({"query_offset": 1.0}, ["query_offset", "integer"]),
    ({"logits_soft_cap": 0}, ["logits_soft_cap", "positive", "0"]),
    ({"logits_soft_cap": -3.0}, ["logits_soft_cap", "-3.0"]),
    ({"logits_soft_cap": 1e38}, ["logits_soft_cap", "1e+30", "1e+38"]),
    ({"logits_soft_cap": 10**400}, ["logits_soft_cap", "1e+30"]),
    ({"sinks": like(2)}, ["sinks", "[N] = [4]", "[2]"]),
    ({"sinks": np.ones(4, int)}, ["sinks", "float"]),
    ({"sinks": "zero"}, ["sinks must be an array", "'zero'"]),
    ({"value": None}, ["value must be an array", "None"]),
    ({"bias": [[1.0], [2.0, 3.0]]}, ["bias must be an array", "[[1.0], [2.0, 3.0]]"]),
    ({"scale": [[1.0], [2.0, 3.0]]}, ["scale must be an array", "[[1.0], [2.0, 3.0]]"]),
    ({"query_seq_lengths": [[1], [2, 3]]}, ["query_seq_lengths must be an array"]),
    ({"quantization": []}, ["quantization", "[]"]),
    ({"deterministic": 1}, ["deterministic", "1"]),
    ({"return_residual": 1}, ["return_residual", "1"]),
    ({"implementation": "cudnn"}, ["implementation", "'fa4', 'xla', 'emulated'", "'cudnn'"]),
    ({"implementation": ("xla", "cuda")}, ["implementation", "('xla', 'cuda')"]),
    ({"implementation": ()}, ["implementation", "()"]),
    ({"implementation": np.array(["xla", "fa4"])}, ["implementation must be", "'xla'"]),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments(arguments, message):
    """ValueError at trace time: which argument, what was given, what is allowed."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array) and x.ndim}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    call = lambda arrays: attend(**({"query": Q, "key": K, "value": K} | arrays | static))  # noqa: E731
    with pytest.raises(ValueError) as error:  # noqa: PT011
        jax.eval_shape(call, arrays)
    for part in message:
        assert part in str(error.value), str(error.value)


def test_an_offset_or_cap_that_is_traced_where_it_may_not_be():
    with pytest.raises(ValueError, match="logits_soft_cap must be a positive finite number"):
        jax.jit(lambda c: attend(Q, K, K, logits_soft_cap=c))(3.0)
    with pytest.raises(ValueError, match="query_seq_lengths must be an array"):
        jax.jit(lambda a: attend(Q, K, K, query_seq_lengths=[a, a]))(3)


# --- Canonical forms ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def test_equivalent_spellings(arrays):
    """Each pair is one call: window forms, integer dtypes, unlimited sides, broadcasting, scale."""
    q, k, v = arrays
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(6, 5)).astype(np.float32)
    wide = np.array([4, 2**40])  # int64, also while jax has no 64-bit types
    pairs = [
        ({"local_window_size": 2}, {"local_window_size": (2, 2)}),
        ({"local_window_size": (None, 0)}, {"is_causal": True}),
        ({"local_window_size": (2**31, 2**40)}, {}),
        ({"local_window_size": (1, 3), "is_causal": True}, {"local_window_size": (1, 0)}),
        ({"is_causal": True, "query_offset": -1}, {"is_causal": True, "query_offset": [-1, -1]}),
        ({"query_offset": 5}, {}),
        ({"key_value_seq_lengths": wide}, {"key_value_seq_lengths": np.array([4, 5], np.uint8)}),
        ({"is_causal": True, "query_offset": wide * 2**20}, {}),
        (
            {"is_causal": True, "query_offset": np.array([0, -(2**60)])},
            {"is_causal": True, "query_seq_lengths": [6, 0]},
        ),
        ({"bias": bias}, {"bias": np.broadcast_to(bias, (2, 4, 6, 5))}),
        ({"mask": bias[0] > 0}, {"mask": np.broadcast_to(bias[0] > 0, (1, 1, 6, 5))}),
        ({"scale": None}, {"scale": jnp.float32(8**-0.5)}),
        ({"scale": np.float64(0.5)}, {"scale": 0.5}),
        ({"query_seq_lengths": [-3, 6]}, {"query_seq_lengths": np.array([0, 9], np.int8)}),
    ]

    @jax.jit
    def run():
        return [[attend(q, k, v, **options) for options in pair] for pair in pairs]

    for pair, (first, second) in zip(pairs, run(), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-6, err_msg=str(pair))


def test_without_a_batch(arrays):
    q, k, v = (x[0] for x in arrays)
    ids = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 1, 2, 2])
    options = {
        "query_segment_ids": ids[0],
        "key_value_segment_ids": ids[1],
        "key_value_seq_lengths": np.array(4),
        "query_seq_lengths": np.array([5]),
        "query_offset": 1,
        "is_causal": True,
        "bias": np.ones((4, 6, 5), np.float32),
    }
    out, lse = jax.jit(lambda: attend(q, k, v, **options, return_residual=True))()
    assert out.shape == (6, 4, 8)
    assert lse.shape == (6, 4)
    assert lse.dtype == jnp.float32
    masks = {
        "query_segment_ids": ids[0][None],
        "key_value_segment_ids": ids[1][None],
        "key_value_seq_lengths": [4],
        "query_seq_lengths": [5],
        "query_offset": 1,
        "is_causal": True,
    }
    exact = oracle.Attention(q[None], k[None], v[None], bias=options["bias"], masks=masks)
    np.testing.assert_allclose(out, exact.out[0], atol=1e-5)
    np.testing.assert_allclose(lse, exact.lse[0], atol=1e-5)


def test_gradients_have_the_dtype_of_their_argument(arrays):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
    bias, sinks = jnp.ones((6, 5), jnp.float16), jnp.ones(4, jnp.float32)
    scale = jnp.bfloat16(0.5)

    def loss(q, k, v, bias, sinks, scale):
        out = attend(q, k, v, bias, sinks=sinks, scale=scale)
        assert out.dtype == jnp.bfloat16
        return out.astype(jnp.float32).sum()

    given = (q, k, v, bias, sinks, scale)
    for gradient, x in zip(jax.eval_shape(jax.grad(loss, range(6)), *given), given, strict=True):
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
def test_floats_of_8_bits_and_fewer(arrays, dtype):
    """Nothing of JAX promotes them: they are computed with as float32, their gradients are theirs.

    float4_e2m1fn has no infinity, and makes its smallest number of -inf.
    """
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.choice([-6, -0.5, 0, 2], (6, 5)), dtype)
    sinks = jnp.asarray([-6, 0, 1, 2], dtype)

    @jax.jit
    def run(bias, sinks):
        out, pull = jax.vjp(lambda bias, sinks: attend(*arrays, bias, sinks=sinks), bias, sinks)
        return out, pull(jnp.full_like(out, 0.01))

    out, gradients = run(bias, sinks)
    want, want_gradients = run(bias.astype(jnp.float32), sinks.astype(jnp.float32))
    np.testing.assert_array_equal(out, want)
    for gradient, exact in zip(gradients, want_gradients, strict=True):
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, exact.astype(dtype))


def test_float64():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v = (rng.normal(size=(1, 6, 2, 4)) for _ in range(3))
        call = functools.partial(attend, is_causal=True, return_residual=True)
        out, lse = jax.jit(call)(q, k, v)
        assert out.dtype == lse.dtype == jnp.float64
    exact = oracle.Attention(q, k, v, masks={"is_causal": True})
    np.testing.assert_allclose(out, exact.out, atol=1e-13)
    np.testing.assert_allclose(lse, exact.lse, atol=1e-13)


def test_wider_bias_sinks_and_scale_change_no_dtype(arrays):
    """Out is of query's dtype and the residual float32, gradients of their arguments' dtypes."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
    with jax.enable_x64(True):
        bias, sinks, scale = jnp.zeros((6, 5)), jnp.ones(4), jnp.asarray(0.3)

        def call(bias, sinks, scale):
            return attend(q, k, v, bias, sinks=sinks, scale=scale, return_residual=True)

        (out, lse), pull = jax.vjp(call, bias, sinks, scale)
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
        for gradient in pull((out, lse)):
            assert gradient.dtype == jnp.float64


# --- Choice of implementation ---------------------------------------------------------------------

H16 = tuple(x.astype(jnp.bfloat16) for x in (Q, K, K))


@pytest.fixture
def built(monkeypatch, tmp_path):
    """As if the bundle were there, and its kernels computed by XLA: records what was chosen."""
    chosen = []

    def recorded(spec, operands, *, platform):
        chosen.append(platform)
        return operands.query, operands.query[..., 0]

    monkeypatch.setattr(bundle, "directory", lambda: tmp_path)
    monkeypatch.setattr(fa4, "attend", recorded)
    monkeypatch.setattr(implementations, "_warned", set())
    return chosen


UNSERVED = [
    ({"bias": like(6, 5)}, "bias"),
    ({"mask": np.ones((6, 5), bool)}, "mask"),
    ({"deterministic": True}, "deterministic=True"),
    ({"query": Q, "key": K, "value": K}, "dtype float32"),
    (
        {x: like(2, 5, 2, 136, dtype=jnp.bfloat16) for x in ("query", "key")},
        "head dimension 136 of query and key",
    ),
    ({"value": like(2, 5, 2, 12, dtype=jnp.bfloat16)}, "head dimension 12 of value"),
]


@pytest.mark.parametrize(("arguments", "reason"), UNSERVED, ids=[r for _, r in UNSERVED])
def test_reasons(arguments, reason, built):
    """fa4 raises with the reason; None warns once and uses XLA; a tuple falls through."""
    call = functools.partial(
        fa4_jax.dot_product_attention,
        **(dict(zip(("query", "key", "value"), H16, strict=True)) | arguments),
    )
    for name in ("fa4", "emulated", ("fa4", "emulated")):
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(call, implementation=name))
    with pytest.warns(UserWarning, match=reason) as caught:
        jax.eval_shape(call)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(call)
        jax.eval_shape(functools.partial(call, implementation=("fa4", "xla")))
    assert not built


def test_every_reason_is_listed(built):
    with pytest.raises(NotImplementedError) as error:
        fa4_jax.dot_product_attention(
            Q, K, K, like(6, 5), deterministic=True, implementation=("emulated", "fa4")
        )
    text = str(error.value)
    for part in ('"emulated"', '"fa4"', "bias", "deterministic", "dtype float32"):
        assert part in text


def test_choice_where_the_kernels_serve(built):
    """One program for all platforms if XLA may stand in, else one for a single platform."""
    for implementation, platform in (
        (None, None),
        ("fa4", "cuda"),
        ("emulated", "cpu"),
        (("fa4", "xla"), None),
        (("fa4", "emulated"), "cuda"),
        (("emulated", "xla"), "cpu"),
    ):
        fa4_jax.dot_product_attention(*H16, implementation=implementation)
        assert built.pop() == platform, implementation
    fa4_jax.dot_product_attention(
        *H16,
        query_segment_ids=np.ones((2, 6), int),
        key_value_segment_ids=np.ones((2, 5), int),
        logits_soft_cap=2.0,
        sinks=like(4),
        is_causal=True,
        query_offset=1,
        local_window_size=(3, 0),
        query_seq_lengths=[1, 2],
        key_value_seq_lengths=[1, 2],
        implementation="fa4",
    )
    assert built.pop() == "cuda"
    fa4_jax.dot_product_attention(*H16, implementation=("xla", "fa4"))
    empty = fa4_jax.dot_product_attention(H16[0][:, :0], *H16[1:], implementation="fa4")
    assert empty.shape == (2, 0, 4, 8)
    assert not built


def test_without_a_bundle(monkeypatch):
    def missing():
        raise bundle.BundleError("the native part is not built")

    monkeypatch.setattr(bundle, "directory", missing)
    monkeypatch.setattr(implementations, "_warned", set())
    with pytest.warns(UserWarning, match="not built") as caught:
        fa4_jax.dot_product_attention(*H16)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    fa4_jax.dot_product_attention(*H16, is_causal=True)  # a second warning would be an error
    with pytest.raises(NotImplementedError, match="not built"):
        fa4_jax.dot_product_attention(*H16, implementation="fa4")


def test_quantization_is_never_dropped():
    for name in (None, "xla", "fa4", ("fa4", "xla")):
        with pytest.raises(ValueError, match=r"quantization='fp3'.*'nvfp4_fp8'"):
            fa4_jax.dot_product_attention(*H16, quantization="fp3", implementation=name)
    with pytest.raises(NotImplementedError, match=r"quantization=.*no quantised kernel"):
        fa4_jax.dot_product_attention(*H16, quantization="fp8", implementation="fa4")


# --- Lowering and export --------------------------------------------------------------------------


def test_lowers_for_cuda_without_a_gpu():
    call = functools.partial(attend, is_causal=True, local_window_size=(3, 0))
    assert jax.eval_shape(call, *H16).shape == (2, 6, 4, 8)
    text = jax.jit(call).trace(*H16).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in text


def test_export_with_symbolic_batch_and_lengths(arrays):
    """Values and gradients, with every kind of mask, at sizes unknown when exported."""
    b, t, s = export.symbolic_shape("b, t, s")
    spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def run(q, k, v, bias, mask, lengths, offset, query_ids, key_ids):
        call = functools.partial(
            attend,
            mask=mask,
            is_causal=True,
            query_offset=offset,
            key_value_seq_lengths=lengths,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
        )
        out, pull = jax.vjp(call, q, k, v, bias)
        return out, pull(jnp.ones_like(out))

    exported = export.export(jax.jit(run))(
        spec(b, t, 4, 8),
        spec(b, s, 2, 8),
        spec(b, s, 2, 8),
        spec(4, t, s),
        spec(b, 1, 1, s, dtype=bool),
        spec(b, dtype=jnp.int32),
        spec(dtype=jnp.int32),
        spec(b, t, dtype=jnp.int32),
        spec(b, s, dtype=jnp.int32),
    )
    loaded = export.deserialize(exported.serialize())
    q, k, v = arrays
    bias = np.zeros((4, 6, 5), np.float32)
    mask = np.ones((2, 1, 1, 5), bool)
    given = (q, k, v, bias, mask, np.array([5, 3], np.int32), np.int32(-1))
    given += (np.zeros((2, 6), np.int32), np.zeros((2, 5), np.int32))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6),
        loaded.call(*given),
        jax.jit(run)(*given),
    )


def test_import_does_nothing():
    """No CUDA library, no shared library of ours, no backend: only Python modules."""
    script = """
import fa4_jax, sys
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libfa4_jax" not in maps
assert not {"flax", "cutlass", "scipy.optimize"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_export_safety_checks_name_every_target():
    assert [str(c) for c in fa4_jax.EXPORT_SAFETY_CHECKS] == [
        str(export.DisabledSafetyCheck.custom_call(name))
        for name in ("fa4_jax.forward.v1", "fa4_jax.backward.v1")
    ]
