"""The Hopper kernels on the emulator: values and gradients, hardware's results, schedules, mutants.

The value tests take the users' road: `fa4_jax.dot_product_attention` under jit and grad, the typed
custom calls, the bundle's PTX. The emulator pretends to have two SMs, so that every CTA of a
persistent grid takes several tiles and its rings go round, and checks for races all along.

`python tests/mutants.py` tells what each check finds when synchronisation is missing.
"""

import os

# The library reads the first at its first emulated call, the second at every one.
os.environ.setdefault("FA4_JAX_EMULATED_SMS", "2")
os.environ.setdefault("FA4_JAX_EMULATED_RACES", "1")

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import mutants
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
    "rows_before_all_keys": Case(
        (1, 150, 190, 1, 1, 64, 64), masks=dict(is_causal=True, query_offset=[-70])
    ),
    "rows_after_all_keys": Case(
        (1, 250, 90, 1, 1, 128, 128), "float16", dict(local_window_size=(30, None))
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_right(case):
    """By the accuracy rule against float64, with NaN wherever no query may look."""
    B, T, S, N, K, H, Hv = case.sizes
    dtype = jnp.dtype(case.dtype)
    random = np.random.default_rng(len(case.masks) + H)
    visible = oracle.visible_keys((B, 1, T, S), **case.masks)[:, 0]
    queries, keys = visible.any(2), visible.any(1)
    shapes = {
        "query": ((B, T, N, H), queries),
        "key": ((B, S, K, H), keys),
        "value": ((B, S, K, Hv), keys),
        "dout": ((B, T, N, Hv), queries),
    }
    normal = {
        name: random.standard_normal(shape).astype(dtype) for name, (shape, _) in shapes.items()
    }
    clean, dirty = (
        {
            name: np.where(shapes[name][1][..., None, None], x, np.asarray(filling, dtype))
            for name, x in normal.items()
        }
        for filling in (0, np.nan)
    )
    dlse = random.standard_normal((B, T, N)).astype(np.float32)

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


# ---- the same results as on the hardware


def units(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y| in units in the last place of y, or of y's root mean square where y is smaller.

    (A sum that cancels to nearly 0 keeps the error of its terms.)
    """
    bits = ml_dtypes.finfo(y.dtype).nmant
    x, y = x.astype(np.float64), y.astype(np.float64)
    size = np.maximum(np.abs(y), np.sqrt(np.mean(y**2)))
    return np.abs(x - y) / np.exp2(np.floor(np.log2(size)) - bits)


@pytest.mark.parametrize("case", make_sm90.CASES, ids=[c.name for c in make_sm90.CASES])
def test_results_are_those_of_an_h200(case):
    """Bit-equal where the arithmetic is defined, else within a unit in the last place.

    Defined: products and their sums, in the tensor core's order and truncation, and all roundings.
    They are alone in the uniform cases' out, dq, dk and dv, whose weights are powers of two.
    Not defined: the last bits of ex2.approx, lg2.approx and rcp.approx, which are the hardware's
    own. They decide how a weight that lies between two 16-bit numbers is rounded, so that elsewhere
    some elements, about one in a hundred or less, differ in their last place.
    """
    if not FIXTURE.exists():
        pytest.skip(f"{FIXTURE.name} has not been made; see make_sm90.py")
    with np.load(FIXTURE) as archive:
        stored = dict(archive)
    if f"{case.name}.out" not in stored:
        pytest.skip(f"{FIXTURE.name} is older than this case; see make_sm90.py")
    found = make_sm90.results(case, "emulated")
    np.testing.assert_allclose(found["lse"], stored[f"{case.name}.lse"], rtol=0, atol=2e-6)
    for name in ("out", "dq", "dk", "dv"):
        x, y = (a.view(jnp.dtype(case.dtype)) for a in (found[name], stored[f"{case.name}.{name}"]))
        if case.uniform:
            np.testing.assert_array_equal(x, y, err_msg=name)
        else:
            assert units(x, y).max() <= 1, name
            assert np.mean(x == y) > 0.98, name


# ---- schedules and missing synchronisation


def kernels(*names: str) -> list[str]:
    return [f"sm90_{name}" for name in names]


SCHEDULED = kernels(
    "forward_bf16_h128_causal",
    "forward_f16_h96_window",
    "forward_bf16_h64_segments_capped",
    "backward_bf16_h128_causal",
    "backward_bf16_h128_full",
    "backward_f16_h64_window",
)
MUTATED = kernels(
    "forward_bf16_h128_causal",
    "forward_bf16_h64_window",
    "forward_bf16_h128_segments",
    "backward_bf16_h128_causal",
    "backward_bf16_h128_full",
)


def run_seeds(kernel: str, seeds: range) -> None:
    """Every schedule gives the same bits, and the race check has nothing to say of any."""
    workload = mutants.Workload(kernel)
    expected = workload.run(workload.directory, races=True)
    for seed in seeds:
        found = workload.run(workload.directory, races=True, seed=seed)
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x, err_msg=f"seed {seed}: {name}")


@pytest.mark.parametrize("kernel", SCHEDULED)
def test_some_schedules_give_the_same_without_a_race(kernel):
    run_seeds(kernel, range(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SCHEDULED)
def test_fifty_schedules_give_the_same_without_a_race(kernel):
    run_seeds(kernel, range(1, 51))


def judge(kernel: str, every: int) -> None:
    """Each mutant, or each ``every``-th, is caught, or there is a reason why it cannot be."""
    workload = mutants.Workload(kernel)
    all_mutants = list(mutants.mutants(workload.ptx))
    assert len(all_mutants) > 50
    unknown = [
        f"PTX line {mutant.line}: {mutant.kind}: {mutant.text}"
        for mutant in all_mutants[::every]
        if not workload.judge(mutant.ptx, seeds=2)
        and not mutants.excuse(workload.operation, mutant)
    ]
    assert not unknown


@pytest.mark.parametrize("kernel", MUTATED)
def test_missing_synchronisation_is_noticed_sample(kernel):
    judge(kernel, every=7)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", MUTATED)
def test_missing_synchronisation_is_noticed(kernel):
    judge(kernel, every=1)
