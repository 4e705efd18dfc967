"""Windows of `AttentionSpec`, one key at a time and a block at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fa4_jax.spec import POSITION_LIMIT, AttentionSpec, Operands

SIDES = (None, 0, 1, 5)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(SIDES, SIDES)))
def test_windows(left, right):
    spec = AttentionSpec(left=left, right=right)
    positions, keys = np.arange(-4, 12)[:, None], np.arange(8)
    expected = np.array(
        [
            [
                (left is None or j >= p - left) and (right is None or j <= p + right)
                for j in range(8)
            ]
            for p in range(-4, 12)
        ]
    )
    np.testing.assert_array_equal(spec.in_window(jnp.array(positions), jnp.array(keys)), expected)
    assert spec.has_window == (left is not None or right is not None)
    for first, last in ((0, 3), (4, 7), (8, 11)):
        for first_key, last_key in ((0, 3), (4, 7), (6, 6)):
            block = expected[first + 4 : last + 5, first_key : last_key + 1]
            assert spec.block_in_window(first, last, first_key, last_key) == block.any()


@pytest.mark.parametrize("position", [-POSITION_LIMIT, POSITION_LIMIT])
def test_positions_at_the_limit_do_not_overflow(position):
    spec = AttentionSpec(left=POSITION_LIMIT - 1, right=POSITION_LIMIT - 1)
    rows = jnp.int32(position) + jnp.arange(3, dtype=jnp.int32)
    keys = jnp.array([0, 1, 2, POSITION_LIMIT - 4], jnp.int32)
    exact = np.abs(np.asarray(keys, np.int64) - np.asarray(rows, np.int64)[:, None])
    np.testing.assert_array_equal(spec.in_window(rows[:, None], keys), exact <= POSITION_LIMIT - 1)


def test_spec_is_static_and_operands_are_a_tree():
    assert hash(AttentionSpec(right=0, scale=0.5)) == hash(AttentionSpec(right=0, scale=0.5))
    operands = Operands(jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8)), jnp.ones((2, 5, 2, 6)))
    assert operands.sizes == (2, 3, 5, 4, 2, 8, 6)
    assert len(jax.tree.leaves(operands)) == 3
    doubled = jax.tree.map(lambda x: 2 * x, operands)
    assert doubled.mask is None
    assert float(doubled.value[0, 0, 0, 0]) == 2
