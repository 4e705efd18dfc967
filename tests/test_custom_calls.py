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


def forward(query, key, value, scale, lengths=None, kv_lengths=None, offset=None, window=(3, 0)):
    left, right = window
    return custom_calls.forward(
        query, key, value, scale, lengths, kv_lengths, offset, window_left=left, window_right=right
    )


def backward(query, key, value, scale, dlse=None):
    out, lse = forward(query, key, value, scale)
    return custom_calls.backward(
        *(query, key, value, out, lse, out, dlse, scale, None, None, None),
        window_left=3,
        window_right=0,
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
    assert "window_left = 3 : i32, window_right = 0 : i32" in line
    assert "api_version = 4" in line or "mhlo.backend_config" in line
    operands, results = operand_types(line)
    assert operands == [
        *("2x100x4x72xbf16", "2x50x2x72xbf16", "2x50x2x64xbf16", "2xf32"),
        *("0xi32", "0xi32", "0xi32"),
    ]
    assert results == ["2x100x4x64xbf16", "2x100x4xf32"]


def test_present_optional_arrays_are_passed_on():
    lengths = jnp.ones((B,), jnp.int32)
    text = lower_for_cuda(lambda *a: forward(*a, None, lengths, lengths), *arrays(jnp.float16))
    operands, _ = operand_types(call_line(text, "fa4_jax.forward.v1"))
    assert operands[4:] == ["0xi32", "2xi32", "2xi32"]


@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward_lowers_with_scratch_of_the_largest_tile(with_dlse):
    dlse = jnp.ones((B, T, N)) if with_dlse else None
    text = lower_for_cuda(lambda *a: backward(*a, dlse), *arrays())
    operands, results = operand_types(call_line(text, "fa4_jax.backward.v1"))
    assert operands == [
        *("2x100x4x72xbf16", "2x50x2x72xbf16", "2x50x2x64xbf16"),
        *("2x100x4x64xbf16", "2x100x4xf32", "2x100x4x64xbf16"),
        "2x100x4xf32" if with_dlse else "0xf32",
        *("2xf32", "0xi32", "0xi32", "0xi32"),
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


def test_a_length_array_of_the_wrong_size_is_refused_by_name():
    lengths = jnp.ones((B + 1,), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="operand key_value_seq_lengths has shape"):
        jax.block_until_ready(jax.jit(forward)(*arrays(), None, lengths))


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
