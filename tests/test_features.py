"""Segments, soft cap and sinks through the public function: values and every gradient.

`None` on the CPU is the kernels' transforms over XLA, `"emulated"` the kernels themselves, as is
`"fa4"` on a GPU; `test_kernels_gpu.py` has many more cases there.
"""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys

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
    params=[
        pytest.param("emulated", marks=pytest.mark.emulator),
        pytest.param("fa4", marks=pytest.mark.gpu),
    ]
)
def implementation(request):
    if request.param == "emulated":
        request.getfixturevalue("emulator")
    return request.param


@pytest.fixture(scope="module")
def emulator(built_library):
    """Skips on a GPU, and where the bundle was built before the kernels had all of this."""
    if jax.default_backend() != "cpu":
        pytest.skip("the emulator runs on the CPU")
    if not any(
        kernel.operation == "backward" and kernel.select.get("logits") == "capped"
        for kernel in bundle.kernels()
    ):
        pytest.skip("the bundle has no backward kernels with a cap")


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
    "scattered": Case(
        "f16",
        (1, 130, 200, 2, 1, 64, 64),
        dict(
            query_segment_ids=scattered(1, 130, [0, 1, 2, 5], 0),
            key_value_segment_ids=scattered(1, 200, [1, 2, 3, 4], 1),
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


def attend(operands, masks, case, implementation):
    """The arrays among the masks are arguments of their own."""
    return dot_product_attention(
        **operands,
        **masks,
        is_causal=case.masks.get("is_causal", False),
        local_window_size=case.masks.get("local_window_size"),
        logits_soft_cap=case.cap,
        return_residual=True,
        implementation=implementation,
    )


def compute(operands, masks, cotangents, case, implementation, wrap=lambda f: f):
    """out, lse and the gradients by name."""
    call = functools.partial(attend, masks=masks, case=case, implementation=implementation)
    results, pullback = jax.vjp(wrap(call), operands)
    return *results, pullback(cotangents)[0]


def arguments(case, filling=0.0):
    operands, cotangents = inputs(case, filling)
    masks = {name: x for name, x in case.masks.items() if isinstance(x, np.ndarray)}
    return jax.tree.map(jnp.asarray, (operands, masks, cotangents))


def run(case, implementation, filling=0.0):
    function = functools.partial(compute, case=case, implementation=implementation)
    return jax.device_get(jax.jit(function)(*arguments(case, filling)))


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
    slack = {"scale": oracle.slack_of_scale(inputs(CASES[name])[0], exact[2]["query"])}
    for operand, gradient in found[2].items():
        references = exact[2][operand], rounded[2][operand]
        oracle.assert_accurate(f"d{operand}", gradient, *references, slack.get(operand, 1e-5))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(implementation, name):
    """With NaN wherever nobody looks, in the cotangents too."""
    check(name, run(CASES[name], implementation, np.nan))


@pytest.mark.parametrize("name", ["sinks", "all"])
def test_values_and_gradients_of_the_transforms(name):
    """Those around the kernels, with XLA in their place."""
    check(name, run(CASES[name], None, np.nan))


def test_xla_obeys_the_same_rules():
    check("all", run(CASES["all"], "xla", np.nan))


def test_wrong_segments_are_noticed(emulator, monkeypatch):
    """The kernels use all of the bounds, whole tiles at a time, and need zeros where none looks."""
    right = segments.bounds

    def changed(edit):
        return lambda *ids: right(*ids) + jnp.array(edit, jnp.int32)

    def all_clear(*ids):
        every_column = jnp.array([0, ids[1].shape[1]], jnp.int32)
        return right(*ids).at[..., 2:].set(every_column)

    def all_seen(spec, operands):
        ids = operands.query_segment_ids, operands.key_value_segment_ids
        return tuple(jnp.ones(x.shape, bool) for x in ids)

    for name, attribute, mutant in (
        ("packed", "bounds", changed([128, 0, 0, 0])),
        ("packed", "bounds", changed([0, -128, 0, 0])),
        ("scattered", "bounds", all_clear),
        ("scattered", "seen", all_seen),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(segments, attribute, mutant)
            jax.clear_caches()
            operands, masks, _ = arguments(CASES[name], np.nan)
            forward = functools.partial(attend, case=CASES[name], implementation="emulated")
            with pytest.raises(AssertionError):
                check(name, (*jax.device_get(jax.jit(forward)(operands, masks)), {}))
    jax.clear_caches()


# --- Transforms of the kernels --------------------------------------------------------------------

SMALL = Case(
    "f16",
    (2, 40, 72, 2, 2, 64, 64),
    dict(
        is_causal=True,
        query_offset=np.int32([32, 20]),
        query_segment_ids=packed(2, 40, 9, 20, 11),
        key_value_segment_ids=packed(2, 72, 40, 10, 20),
    ),
    cap=2.0,
    sinks=(0.5, -1.0),
)
emulated = functools.partial(compute, case=SMALL, implementation="emulated")


@pytest.fixture(scope="module")
def plain(emulator):
    return jax.jit(emulated)(*arguments(SMALL))


@pytest.mark.emulator
def test_vmap(plain):
    """Over the batch: every element a call of its own, of which sinks and scale are shared."""
    axes = {"query": 0, "key": 0, "value": 0, "sinks": None, "scale": None}
    operands, masks, cotangents = arguments(SMALL)
    operands = {name: x if axes[name] is None else x[:, None] for name, x in operands.items()}
    masks, cotangents = jax.tree.map(lambda x: x[:, None], (masks, cotangents))
    out, lse, gradients = jax.jit(jax.vmap(emulated, (axes, 0, 0)))(operands, masks, cotangents)
    gradients = {n: x[:, 0] if axes[n] == 0 else x.sum(0) for n, x in gradients.items()}
    oracle.assert_close((out[:, 0], lse[:, 0], gradients), plain, 2**-9)


def specs(batch, time, heads):
    operands = {
        "query": P(batch, time, heads),
        "key": P(batch, None, heads),
        "value": P(batch, None, heads),
        "sinks": P(heads),
        "scale": P(),
    }
    masks = {
        "query_offset": P(batch),
        "query_segment_ids": P(batch, time),
        "key_value_segment_ids": P(batch),
    }
    return operands, masks, (P(batch, time, heads), P(batch, time, heads))


@pytest.mark.emulator
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("mode", ["jit", "jit, queries", "shard_map"])
def test_shards(plain, mode):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    layout = specs("x", "y", None) if mode == "jit, queries" else specs("x", None, "y")
    function = emulated
    if mode == "shard_map":
        operands, _, results = layout
        function = jax.shard_map(
            emulated, mesh=mesh, in_specs=layout, out_specs=(*results, operands)
        )
    sharded = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arguments(SMALL), layout
    )
    oracle.assert_close(jax.jit(function)(*sharded), plain, 2**-9)


@pytest.mark.emulator
def test_remat(plain):
    policy = jax.checkpoint_policies.nothing_saveable
    function = functools.partial(emulated, wrap=functools.partial(jax.checkpoint, policy=policy))
    oracle.assert_close(jax.jit(function)(*arguments(SMALL)), plain, 2**-9)


# --- One program ----------------------------------------------------------------------------------


def test_one_program_for_cuda_and_the_emulator(built_library):
    """The same custom calls, operand types and attributes included; no architecture in them."""

    def calls(implementation, platform):
        function = functools.partial(compute, case=CASES["all"], implementation=implementation)
        traced = jax.jit(function).trace(*arguments(CASES["all"]))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        found = re.findall(r"custom_call (@fa4_jax\S+)\(.*?\) (.*)", text)
        assert "sm_" not in str(found)
        return found

    found = calls("fa4", "cuda")
    assert len(found) == 2
    assert calls("emulated", "cpu") == calls(None, "cuda") == found


SCRIPT = """
import functools, sys
import jax, numpy as np
import test_features as t
operands, masks, cotangents = t.arguments(t.CASES["all"], np.nan)
function = functools.partial(t.attend, case=t.CASES["all"], implementation="emulated")
np.savez(sys.argv[1], *jax.device_get(jax.jit(function)(operands, masks)))
"""


@pytest.mark.emulator
@pytest.mark.parametrize("architecture", ["sm_100a"])
def test_every_architecture_runs_the_program(emulator, architecture, tmp_path):
    """All other tests run the bundle's first architecture, sm_90a."""
    if architecture not in bundle.architectures():
        pytest.skip(f"the bundle has no kernels for {architecture}")
    folder = pathlib.Path(__file__).parent
    environment = os.environ | {
        "FA4_JAX_EMULATED_ARCH": architecture,
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)]),
    }
    path = tmp_path / "results.npz"
    subprocess.run([sys.executable, "-c", SCRIPT, str(path)], env=environment, check=True)
    with np.load(path) as results:
        out, lse = results.values()
    check("all", (out, lse, {}))
