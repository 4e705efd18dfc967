"""Block bounds and visibility by segment ids, against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

from fa4_jax import segments
from fa4_jax.spec import AttentionSpec, Operands

SIZES = ((64, 1), (150, 130))


@st.composite
def ids(draw, batch=2):
    """Query and key ids of one of a few sizes (each is compiled), sorted or not."""
    num_rows, num_columns = draw(st.sampled_from(SIZES))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    few = draw(st.sampled_from([1, 2, 3, 9, 200]))
    # The extremes too: a comparison by subtraction would leave int32.
    values = np.concatenate([random.integers(-4, 4, few), [-(2**31), 2**31 - 1]])
    rows, columns = (
        random.choice(values[: few + draw(st.integers(0, 2))], (batch, size)).astype(np.int32)
        for size in (num_rows, num_columns)
    )
    if draw(st.booleans()):
        rows, columns = np.sort(rows), np.sort(columns)
    return rows, columns


bounds = jax.jit(segments.bounds)


@settings(deadline=None, max_examples=100)
@given(ids())
def test_bounds_of_blocks(pair):
    rows, columns = pair
    found = np.asarray(bounds(rows, columns))
    assert found.shape == (len(rows), -(-rows.shape[1] // segments.BLOCK), 4)
    sorts = (np.diff(columns) >= 0).all()
    for b, block in np.ndindex(found.shape[:2]):
        of_block = rows[b, block * segments.BLOCK : (block + 1) * segments.BLOCK]
        shares = of_block[:, None] == columns[b]
        begin, end, clear_begin, clear_end = found[b, block]
        some, every = np.flatnonzero(shares.any(0)), shares.all(0)
        if len(some):
            assert (begin, end) == (some[0], some[-1] + 1)
        else:
            assert end <= begin
        if clear_begin < clear_end:
            assert 0 <= clear_begin < clear_end <= columns.shape[1]
            assert every[clear_begin:clear_end].all()
        if sorts:
            assert max(clear_end - clear_begin, 0) == every.sum()


@functools.cache
def seen(left, right):
    def run(operands):
        return segments.seen(AttentionSpec(left, right), Operands(None, None, None, **operands))

    return jax.jit(run)


@settings(deadline=None, max_examples=100)
@given(ids(), st.data())
def test_what_is_seen(pair, data):
    rows, columns = pair
    window = data.draw(st.sampled_from([(7, 3), (0, 2**30 - 1)]))
    length = st.one_of(st.just(200), st.integers(-2, 170))
    offset = st.sampled_from([0, 0, -40, 90, 2**30, -(2**30)])
    masks = {
        name: np.int32(data.draw(st.tuples(each, each)))
        for name, each in (
            ("query_seq_lengths", length),
            ("key_value_seq_lengths", length),
            ("query_offset", offset),
        )
    }
    masks |= {"query_segment_ids": rows, "key_value_segment_ids": columns}
    visible = oracle.visible_keys(
        (2, 1, rows.shape[1], columns.shape[1]), local_window_size=window, **masks
    )[:, 0]
    queries, keys = seen(*window)(masks)
    np.testing.assert_array_equal(queries, visible.any(2))
    np.testing.assert_array_equal(keys, visible.any(1))


def test_symbolic_sizes():
    def run(rows, columns):
        operands = Operands(None, None, None, query_segment_ids=rows, key_value_segment_ids=columns)
        return segments.bounds(rows, columns), segments.seen(AttentionSpec(right=0), operands)

    batch, num_rows, num_columns = export.symbolic_shape("b, t, s")
    exported = export.export(jax.jit(run))(
        jax.ShapeDtypeStruct((batch, num_rows), jnp.int32),
        jax.ShapeDtypeStruct((batch, num_columns), jnp.int32),
    )
    random = np.random.default_rng(0)
    rows, columns = (random.integers(0, 3, (2, size), np.int32) for size in SIZES[1])
    found, seen = exported.call(rows, columns)
    np.testing.assert_array_equal(found, bounds(rows, columns))
    visible = oracle.visible_keys(
        (2, 1, *SIZES[1]), is_causal=True, query_segment_ids=rows, key_value_segment_ids=columns
    )
    np.testing.assert_array_equal(seen[0], visible[:, 0].any(2))
    np.testing.assert_array_equal(seen[1], visible[:, 0].any(1))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_in_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = (np.arange(2 * n, dtype=np.int32).reshape(2, n) // 9 for n in SIZES[1])
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(segments.bounds, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(rows, columns), bounds(rows, columns))


def test_where_ranks_may_not_be_promoted():
    rows, columns = np.zeros((2, 150), np.int32), np.zeros((2, 130), np.int32)
    operands = Operands(
        *(jnp.zeros((2, size, 1, 8)) for size in (150, 130, 130)),
        query_segment_ids=jnp.asarray(rows),
        key_value_segment_ids=jnp.asarray(columns),
    )
    with jax.numpy_rank_promotion("raise"):
        assert segments.bounds(rows, columns).shape == (2, 3, 4)
        assert all(x.all() for x in segments.seen(AttentionSpec(), operands))
