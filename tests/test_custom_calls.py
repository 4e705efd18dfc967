"""The typed custom calls: what is lowered, what the handlers refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax import custom_calls

UNLIMITED = custom_calls.UNLIMITED
B, T, S, N, K, H, HV = 2, 100, 50, 4, 2, 72, 64

pytestmark = pytest.mark.usefixtures("built_library")


def arrays(dtype=jnp.bfloat16):
    """query, key, value, scale."""
    return (
        jnp.ones((B, T, N, H), dtype),
        jnp.ones((B, S, K, H), dtype),
        jnp.ones((B, S, K, HV), dtype),
        jnp.ones((B,), jnp.float32),
    )


def segments(rows=T):
    """Query ids, kv ids and bounds of blocks of ``rows``."""
    return (
        jnp.ones((B, T), jnp.int32),
        jnp.ones((B, S), jnp.int32),
        jnp.zeros((B, -(-rows // 64), 4), jnp.int32),
    )


def forward(
    *inputs,
    lengths=None,
    kv_lengths=None,
    offset=None,
    segments=(None, None, None),
    sinks=None,
    window=(3, 0),
    cap=0.0,
):
    left, right = window
    return custom_calls.forward(
        *(*inputs, lengths, kv_lengths, offset, *segments, sinks),
        window_left=left,
        window_right=right,
        logits_soft_cap=cap,
    )


def backward(query, key, value, scale, dlse=None, segments=(None, None, None), cap=0.0):
    out, lse = forward(query, key, value, scale)
    return custom_calls.backward(
        *(query, key, value, out, lse, out, dlse, scale, None, None, None, *segments),
        window_left=3,
        window_right=0,
        logits_soft_cap=cap,
    )


def lower_for_cuda(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def call_line(text, target):
    (line,) = [line for line in text.splitlines() if f"@{target}(" in line]
    return line


def operand_types(line):
    """The types of a custom call's operands and results, in order."""
    operands, results = re.search(r" : \(([^()]*)\) -> \(?([^()]*)\)?$", line).groups()
    return re.findall(r"tensor<([^>]*)>", operands), re.findall(r"tensor<([^>]*)>", results)


def test_forward_lowers_for_cuda_on_a_host_without_a_gpu():
    line = call_line(lower_for_cuda(forward, *arrays()), "fa4_jax.forward.v1")
    assert "logits_soft_cap = 0.000000e+00 : f32" in line
    assert "window_left = 3 : i32, window_right = 0 : i32" in line
    assert "api_version = 4" in line or "mhlo.backend_config" in line
    operands, results = operand_types(line)
    assert operands == [
        *("2x100x4x72xbf16", "2x50x2x72xbf16", "2x50x2x64xbf16", "2xf32"),
        *("0xi32", "0xi32", "0xi32", "0x0xi32", "0x0xi32", "0x0x0xi32", "0x0xf32"),
    ]
    assert results == ["2x100x4x64xbf16", "2x100x4xf32"]


def test_present_optional_arrays_are_passed_on():
    lengths = jnp.ones((B,), jnp.int32)
    present = {
        "kv_lengths": lengths,
        "offset": lengths,
        "segments": segments(),
        "sinks": jnp.ones((B, N)),
        "cap": 30,
    }
    text = lower_for_cuda(lambda *a: forward(*a, **present), *arrays(jnp.float16))
    line = call_line(text, "fa4_jax.forward.v1")
    operands, _ = operand_types(line)
    assert operands[4:] == [
        *("0xi32", "2xi32", "2xi32", "2x100xi32", "2x50xi32", "2x2x4xi32", "2x4xf32")
    ]
    assert "logits_soft_cap = 3.000000e+01 : f32" in line


def test_present_segments_are_passed_on_to_the_backward():
    present = segments(rows=S)
    text = lower_for_cuda(lambda *a: backward(*a, segments=present, cap=30), *arrays())
    line = call_line(text, "fa4_jax.backward.v1")
    operands, _ = operand_types(line)
    assert operands[-3:] == ["2x100xi32", "2x50xi32", "2x1x4xi32"]
    assert "logits_soft_cap = 3.000000e+01 : f32" in line


@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward_lowers_with_scratch_of_the_largest_tile(with_dlse):
    dlse = jnp.ones((B, T, N)) if with_dlse else None
    text = lower_for_cuda(lambda *a: backward(*a, dlse), *arrays())
    operands, results = operand_types(call_line(text, "fa4_jax.backward.v1"))
    assert operands == [
        *("2x100x4x72xbf16", "2x50x2x72xbf16", "2x50x2x64xbf16"),
        *("2x100x4x64xbf16", "2x100x4xf32", "2x100x4x64xbf16"),
        "2x100x4xf32" if with_dlse else "0x0x0xf32",
        *("2xf32", "0xi32", "0xi32", "0xi32", "0x0xi32", "0x0xi32", "0x0x0xi32"),
    ]
    assert results == [
        *("2x100x4x72xbf16", "2x50x2x72xbf16", "2x50x2x64xbf16"),
        *("2x4x128x128xf32", "2x4x128xf32", "2x4x128xf32"),
    ]


def test_the_targets_are_all_the_calls_that_are_lowered():
    text = lower_for_cuda(backward, *arrays())
    assert set(re.findall(r"custom_call @([\w.]+)", text)) == set(custom_calls.TARGETS)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
def test_result_types_are_right_inside_shard_map(axis_type, check_vma):
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(axis_type,))
    spec = jax.sharding.PartitionSpec("batch")
    sharded = jax.device_put(arrays(), jax.NamedSharding(mesh, spec))
    function = jax.shard_map(
        backward, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=check_vma
    )
    with jax.set_mesh(mesh):
        results = jax.eval_shape(jax.jit(function), *sharded)
    assert [x.shape for x in results] == [(B, T, N, H), (B, S, K, H), (B, S, K, HV)]


def test_results_keep_an_explicit_sharding():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("batch")
    with jax.set_mesh(mesh):
        sharded = jax.device_put(arrays(), jax.NamedSharding(mesh, spec))
        for x in jax.eval_shape(backward, *sharded):
            assert x.sharding.spec == jax.sharding.PartitionSpec("batch", None, None, None)


def with_change(index, change):
    changed = list(arrays())
    changed[index] = change(changed[index])
    return changed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (with_change(0, lambda q: q.astype(jnp.float32)), "operand query is neither bf16 nor f16"),
        (with_change(1, lambda k: k.astype(jnp.float16)), "operand key is not bf16"),
        (with_change(1, lambda k: k[:, :, 0]), r"operand key has shape \[2, 50, 72\].*rank 4"),
        (
            with_change(2, lambda v: v[:, 1:]),
            r"operand value has shape \[2, 49, 2, 64\], expected \[B, S, K, Hv\] = "
            r"\[2, 50, 2, 64\]",
        ),
        (
            with_change(3, lambda s: s[:1]),
            r"operand scale has shape \[1\], expected \[B\] = \[2\]",
        ),
        (with_change(0, lambda q: q[:, :, :3]), "3 query heads are not a multiple of 2 kv heads"),
        (with_change(1, lambda k: k[:, :0]), "the dimension S is 0"),
        (
            with_change(2, lambda v: v[..., :60]),
            "the head dim Hv = 60 is not a multiple of 8 up to 128",
        ),
    ],
)
def test_the_handler_refuses_what_does_not_fit_by_name(arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: fa4_jax: {message}"):
        jax.block_until_ready(jax.jit(forward)(*arguments))


def int32(*shape):
    return jnp.zeros(shape, jnp.int32)


ALL_OR_NONE = "segments are all of query_segment_ids, key_value_segment_ids and segment_bounds"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_lengths": int32(B + 1)}, r"operand key_value_seq_lengths has shape \[3\]"),
        # Zero rows are no way to leave an array out: its shape of zeros is.
        (
            {"segments": (int32(B, 0), *segments()[1:])},
            r"operand query_segment_ids has shape \[2, 0\], expected \[B, T\] = \[2, 100\]",
        ),
        (
            {"segments": (segments()[0], int32(B, T), segments()[2])},
            r"operand key_value_segment_ids has shape \[2, 100\], expected \[B, S\] = \[2, 50\]",
        ),
        (
            {"segments": segments(rows=S)},
            r"operand segment_bounds has shape \[2, 1, 4\], expected \[B, row_blocks, 4\] = "
            r"\[2, 2, 4\]",
        ),
        (
            {"segments": (*segments()[:2], int32(B, 2, 3))},
            r"operand segment_bounds has shape \[2, 2, 3\], expected \[B, row_blocks, 4\]",
        ),
        (
            {"segments": (None, *segments()[1:])},
            "operand query_segment_ids is absent, but key_value_segment_ids is not: " + ALL_OR_NONE,
        ),
        (
            {"segments": (segments()[0], None, segments()[2])},
            "operand key_value_segment_ids is absent, but query_segment_ids is not: " + ALL_OR_NONE,
        ),
        (
            {"segments": (*segments()[:2], None)},
            "operand segment_bounds is absent, but query_segment_ids is not: " + ALL_OR_NONE,
        ),
        (
            {"segments": (None, None, segments()[2])},
            "operand query_segment_ids is absent, but segment_bounds is not: " + ALL_OR_NONE,
        ),
        (
            {"sinks": jnp.zeros((B, K))},
            r"operand sinks has shape \[2, 2\], expected \[B, N\] = \[2, 4\]",
        ),
        ({"cap": -1.0}, r"logits_soft_cap = -1.0* is neither 0 \(none\) nor a positive finite"),
        ({"cap": np.inf}, "logits_soft_cap = inf is neither"),
        ({"cap": np.nan}, "logits_soft_cap = nan is neither"),
    ],
)
def test_optional_arguments_are_checked_by_name(given, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: fa4_jax: {message}"):
        jax.block_until_ready(jax.jit(lambda *a: forward(*a, **given))(*arrays()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"segments": segments(rows=T)},
            r"operand segment_bounds has shape \[2, 2, 4\], expected \[B, row_blocks, 4\] = "
            r"\[2, 1, 4\]",
        ),
        ({"dlse": jnp.ones((B, N, T))}, r"operand dlse has shape \[2, 4, 100\]"),
        ({"segments": (*segments(rows=S)[:2], None)}, "operand segment_bounds is absent"),
        ({"cap": -1.0}, "logits_soft_cap = -1"),
    ],
)
def test_the_backward_checks_its_own_by_name(given, message):
    query, key, value, scale = arrays()
    out, lse = jnp.ones((B, T, N, HV), query.dtype), jnp.ones((B, T, N))
    given = {"dlse": None, "segments": (None,) * 3, "cap": 0.0} | given

    @jax.jit
    def call(*inputs):
        return custom_calls.backward(
            *(*inputs, out, lse, out, given["dlse"], scale, None, None, None, *given["segments"]),
            window_left=3,
            window_right=0,
            logits_soft_cap=given["cap"],
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: fa4_jax: {message}"):
        jax.block_until_ready(call(query, key, value))


def test_attributes_are_32_bit_integers():
    with pytest.raises(OverflowError):
        lower_for_cuda(lambda *a: forward(*a, window=(2**31, 0)), *arrays())
    assert np.int32(UNLIMITED) == UNLIMITED


def test_symbolic_sizes_are_padded_symbolically():
    (length,) = jax.export.symbolic_shape("t")
    query, key, value, scale = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays())
    query = jax.ShapeDtypeStruct((B, length, N, H), query.dtype)
    safety = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls.TARGETS]
    exported = jax.export.export(jax.jit(backward), platforms=["cuda"], disabled_checks=safety)(
        query, key, value, scale
    )
    assert exported.out_avals[0].shape == (B, length, N, H)
