"""Programs exported on a host without a GPU, and run elsewhere."""

import functools
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import fa4_jax

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"


def attend(query, key, value):
    ids = jnp.broadcast_to(jnp.arange(query.shape[1]) // 50, query.shape[:2])
    return fa4_jax.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        local_window_size=(64, 0),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        sinks=jnp.arange(4.0),
    )


def symbolic_types():
    batch, length = export.symbolic_shape("b, t")
    return [jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]


def problem(batch, length):
    keys = jax.random.split(jax.random.key(length), 3)
    return [
        jax.random.normal(key, (batch, length, heads, 64), jnp.bfloat16)
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    ]


def test_export_needs_the_published_safety_checks():
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in problem(2, 16)]
    with pytest.raises(ValueError, match=r"fa4_jax\.forward\.v1"):
        export.export(jax.jit(attend), platforms=["cuda"])(*types)
    exported = export.export(
        jax.jit(attend), platforms=["cuda"], disabled_checks=fa4_jax.EXPORT_SAFETY_CHECKS
    )(*types)
    assert "fa4_jax.forward.v1" in exported.mlir_module()


def test_the_program_names_no_architecture():
    exported = export.export(
        jax.jit(functools.partial(fa4_jax.dot_product_attention, implementation="fa4")),
        platforms=["cuda"],
        disabled_checks=fa4_jax.EXPORT_SAFETY_CHECKS,
    )(*symbolic_types())
    assert "sm_" not in exported.mlir_module()


def test_symbolic_program_with_its_gradient_runs_in_a_new_process(tmp_path: pathlib.Path):
    exported = export.export(
        jax.jit(attend), platforms=["cuda", "cpu"], disabled_checks=fa4_jax.EXPORT_SAFETY_CHECKS
    )(*symbolic_types())
    (tmp_path / "program").write_bytes(exported.serialize(vjp_order=1))

    expected = {}
    for batch, length in ((1, 5), (3, 130)):
        operands = problem(batch, length)
        out, pullback = jax.vjp(attend, *operands)
        for name, x in zip(
            ("query", "key", "value", "out", "dq", "dk", "dv"),
            (*operands, out, *pullback(out)),
            strict=True,
        ):
            expected[f"{name}_{length}"] = np.asarray(x, np.float32)
    np.savez(tmp_path / "expected.npz", **expected)

    program = textwrap.dedent(
        """
        import pathlib, sys
        import jax, jax.numpy as jnp, numpy as np
        from jax import export
        import fa4_jax.bundle

        folder = pathlib.Path(sys.argv[1])
        fa4_jax.bundle.library()
        exported = export.deserialize(bytearray((folder / "program").read_bytes()))
        expected = np.load(folder / "expected.npz")
        for length in (5, 130):
            names = ("query", "key", "value")
            operands = [jnp.asarray(expected[f"{n}_{length}"], jnp.bfloat16) for n in names]
            out, pullback = jax.vjp(jax.jit(exported.call), *operands)
            for name, x in zip(("out", "dq", "dk", "dv"), (out, *pullback(out)), strict=True):
                y = expected[f"{name}_{length}"]
                np.testing.assert_allclose(
                    np.asarray(x, np.float32), y, rtol=2**-7, atol=2**-7 * np.abs(y).max()
                )
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300)
