"""Compiles one kernel to a cubin, PTX and its manifest block; run by ``kernels/build.py``.

One process compiles one kernel: ``python -m kernels.compile MODULE NAME DIRECTORY`` writes
``NAME.cubin``, ``NAME.ptx`` and ``NAME.manifest``; ``python -m kernels.compile --list MODULE...``
prints the variants. This is the only module besides the kernels themselves that needs the DSL. It
needs neither a GPU nor a CUDA driver.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

import cutlass
from cutlass import cute
from cutlass.experimental import cuda

from . import abi
from .artifacts import CompileError, check_parameters, normalise_ptx, resources

# The DSL asks the driver for the architecture unless told; there may be no driver.
_ANY_ARCHITECTURE = "sm_90a"


def variants(module: str) -> list[abi.Kernel]:
    """The kernel instances of ``module``, a name below this package such as ``sm90.forward``."""
    return importlib.import_module(f".{module}", __package__).variants()


def compile_kernel(kernel: abi.Kernel) -> tuple[bytes, str, str]:
    """Traces and assembles a kernel.

    Args:
      kernel: an instance as ``abi.py`` describes it.

    Returns:
      The cubin, the normalised PTX, and the kernel's block of the manifest.

    Raises:
      CompileError: the parameters of the compiled code differ from the declaration, the kernel
        spills registers to local memory, or its shared memory exceeds the limit.
    """
    spec = kernel.declaration()
    # The DSL names its dumps after the host function: two kernels must not share a directory.
    with tempfile.TemporaryDirectory() as dumps:
        compiled = cute.compile(
            _host(kernel, spec),
            cutlass.Int64(0),
            cutlass.Int32(0),
            cutlass.Float32(0),
            options=(f"--gpu-arch={spec.architecture} --keep-ptx --keep-cubin --dump-dir={dumps}"),
        )
    cubin, ptx = compiled.artifacts.CUBIN, normalise_ptx(compiled.artifacts.PTX)
    entry = check_parameters(spec, ptx)
    registers, local_bytes = resources(cubin, entry)
    if local_bytes:
        raise CompileError(
            f"{spec.name}: {local_bytes} bytes of local memory per thread (spilled registers or "
            "an array that is not indexed by constants)"
        )
    shared = _dynamic_shared_bytes(str(compiled.ir_module))
    if shared > abi.SHARED_LIMIT:
        raise CompileError(
            f"{spec.name}: {shared} bytes of dynamic shared memory exceed {abi.SHARED_LIMIT}"
        )
    return cubin, ptx, spec.to_manifest(entry=entry, registers=registers, shared=shared)


def _host(kernel: abi.Kernel, spec: abi.KernelSpec) -> Any:
    """A host function that launches ``kernel`` with parameters of the declared kinds.

    It is compiled and never run: dimensions and addresses are placeholders, and only what is static
    in a parameter (box, swizzle, element type) reaches the device code.
    """
    types = {
        "bf16": cutlass.BFloat16,
        "f16": cutlass.Float16,
        "f32": cutlass.Float32,
        "s32": cutlass.Int32,
    }

    def placeholder(parameter: abi.Parameter, address: Any, integer: Any, real: Any) -> Any:
        if isinstance(parameter, abi.S32):
            return integer
        if isinstance(parameter, abi.F32):
            return real
        dtype = types[spec.element_type(parameter.operand)]
        if isinstance(parameter, abi.Pointer):
            return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        swizzle = {0: "none", 32: "s32b", 64: "s64b", 128: "s128b"}[parameter.swizzle]
        return cuda.create_tensor_map_tiled(
            global_address=address,
            dtype=dtype,
            global_dims=list(parameter.box),
            global_strides=[1] * (len(parameter.box) - 1),
            box_dims=list(parameter.box),
            swizzle=cuda.TensorMapSwizzle[swizzle],
        )

    def placeholders(*numbers: Any) -> list[Any]:
        return [placeholder(parameter, *numbers) for parameter in spec.params]

    configuration = {"grid": spec.cluster, "block": (spec.threads, 1, 1), "smem": spec.shared}
    if spec.cluster != (1, 1, 1):
        configuration["cluster"] = spec.cluster
    if spec.ctas_per_sm is not None and spec.architecture.startswith("sm_10"):
        # For Blackwell the assembler ignores setmaxnreg unless told; for Hopper it does not.
        configuration["min_blocks_per_mp"] = spec.ctas_per_sm

    @cute.jit
    def host(address: cutlass.Int64, integer: cutlass.Int32, real: cutlass.Float32):
        kernel.kernel(*placeholders(address, integer, real)).launch(**configuration)

    return host


def _dynamic_shared_bytes(module: str) -> int:
    """Dynamic shared memory of the only launch in the lowered host module.

    The DSL adds up a kernel's allocations late in its pipeline and stores the sum in field 2 of the
    launch configuration (grid, block, shared bytes, ...).
    """
    configuration = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    fields = re.findall(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*{configuration}", module)
    stored = [
        value for field in fields for value in re.findall(rf"llvm\.store (%\w+), {field} :", module)
    ]
    if len(stored) != 1:
        raise CompileError(f"expected one launch in the host module, found {len(stored)}")
    constant = re.search(rf"{stored[0]} = llvm\.mlir\.constant\((\d+) : i64\)", module)
    if constant is None:
        raise CompileError("the launch's shared memory size is not a constant")
    return int(constant[1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the variants of MODULE...")
    parser.add_argument("arguments", nargs="+", metavar="MODULE NAME DIRECTORY")
    options = parser.parse_args(arguments)
    if options.list:
        os.environ["CUTE_DSL_ARCH"] = _ANY_ARCHITECTURE
        specs = [
            (module, kernel.declaration())
            for module in options.arguments
            for kernel in variants(module)
        ]
        json.dump([[module, spec.name, spec.architecture] for module, spec in specs], sys.stdout)
        return 0
    module, name, directory = options.arguments
    matching = [kernel for kernel in variants(module) if kernel.declaration().name == name]
    if len(matching) != 1:
        parser.error(f"{module} has {len(matching)} kernels named {name}")
    cubin, ptx, manifest = compile_kernel(matching[0])
    output = pathlib.Path(directory)
    (output / f"{name}.cubin").write_bytes(cubin)
    (output / f"{name}.ptx").write_text(ptx)
    (output / f"{name}.manifest").write_text(manifest)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CompileError as error:
        sys.exit(f"error: {error}")
