"""An NVFP4 GEMM of CUTLASS's CuTe-DSL tutorials on the emulator; tests/test_peers.py starts it as

    python nvfp4.py EXAMPLES MODULE DIRECTORY < requests > replies

EXAMPLES: the folder examples/python/CuTeDSL of CUTLASS. MODULE: nvfp4_gemm_0, or nvfp4_gemm_1
whose products are of two CTAs.
"""

import dataclasses
import importlib
import sys

import capture
import numpy as np

NUM_SMS = 4
_BLOCK = 16  # values that share a scale
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def operand(generator: np.random.Generator, rows: int, columns: int):
    """A random quantized matrix: packed values, scales as the GEMM reads them, and float64.

    Scales lie in 512-byte atoms of 128 rows and 4 blocks: (row % 32) * 16 + (row / 32) * 4 + block.
    """
    import ml_dtypes

    codes = generator.integers(0, 16, (rows, columns), dtype=np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
    scales = generator.uniform(0.1, 4, (rows, columns // _BLOCK)).astype(ml_dtypes.float8_e4m3fn)
    atoms = scales.view(np.uint8).reshape(rows // 128, 4, 32, columns // _BLOCK // 4, 4)
    ordered = np.ascontiguousarray(atoms.transpose(0, 3, 2, 1, 4))
    return packed, ordered, values * np.repeat(scales.astype(np.float64), _BLOCK, axis=1)


def answer(device: capture.Device, tutorial, request: dict) -> dict:
    """Compiles the GEMM and multiplies A [m,k] by the transpose of B [n,k].

    request: m, n, k (multiples of 256) and runs: options of the emulator for each.
    reply: for each run `launches` and `error`, in units in the last place of the float16 output.
    """
    import cutlass
    from cutlass import cute

    m, n, k = request["m"], request["n"], request["k"]
    generator = np.random.default_rng(0)
    a, a_scales, a_values = operand(generator, m, k)
    b, b_scales, b_values = operand(generator, n, k)
    out = np.zeros((m, n), np.float16)
    arrays = [a, b, a_scales, b_scales, out]
    e2m1, e4m3 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
    types = [e2m1, e2m1, e4m3, e4m3, cutlass.Float16]
    pointers = [
        cute.runtime.make_ptr(dtype, array.ctypes.data, cute.AddressSpace.gmem, assumed_align=16)
        for dtype, array in zip(types, arrays, strict=True)
    ]
    stream = cute.runtime.make_fake_stream()
    gemm = tutorial.Sm100BlockScaledDenseGemmKernel()
    size = (m, n, k, 1)
    compiled = cute.compile(gemm, *pointers, size, stream, options="--enable-tvm-ffi")

    exact = a_values @ b_values.T
    unit = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    runs = []
    for options in request["runs"]:
        device.options = {"lenient_tensor": True, **options}
        device.launches.clear()
        out[:] = 0
        compiled(*arrays, size, 0)
        runs.append(
            {
                "launches": [dataclasses.asdict(launch) for launch in device.launches],
                "error": float(np.max(np.abs(out.astype(np.float64) - exact) / unit)),
            }
        )
    return {"runs": runs}


if __name__ == "__main__":
    examples, name, directory = sys.argv[1:]
    capture.set_environment("sm_100a", NUM_SMS)
    pretended = capture.Device("sm_100a", NUM_SMS, directory)
    pretended.install()
    sys.path.insert(0, examples)
    module = importlib.import_module(f"cute.blackwell.tutorial.tutorial_gemm.{name}")
    capture.serve(lambda request: answer(pretended, module, request))
