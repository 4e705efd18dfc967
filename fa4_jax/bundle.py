"""Finds the shared library and the kernel bundle, and registers the custom calls on first use.

Both lie beside the package, in ``_native/``: a source tree fills it with ``make build``, a wheel
brings it. Importing this module touches neither.

The same target names are registered for two platforms: ``CUDA`` runs the bundle's cubins through
the driver, ``cpu`` runs the bundle's PTX on the emulator.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import threading
from collections.abc import Mapping

import jax

_NATIVE = pathlib.Path(__file__).resolve().parent / "_native"
_LIBRARY = "libfa4_jax.so"
_MANIFEST_HEADER = "fa4_jax-bundle 1"

# FFI target -> stem of the library's handler symbols, Fa4Jax<stem><platform><Stage>.
_HANDLERS = {"fa4_jax.forward.v1": "Forward", "fa4_jax.backward.v1": "Backward"}
# jax.ffi platform -> stage -> the rest of the symbol. XLA's CPU client runs no initialize stage.
_STAGES = {
    "CUDA": {"initialize": "CudaInitialize", "execute": "CudaExecute"},
    "cpu": {"execute": "EmulatedExecute"},
}

_lock = threading.Lock()
_library: ctypes.CDLL | None = None  # set when every target is registered


class BundleError(RuntimeError):
    """The shared library or the kernel bundle is missing or unusable."""


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """One kernel of the bundle, as ``python -m fa4_jax info`` shows it.

    Attributes:
      name: unique name, e.g. ``sm90_forward_bf16_h128_causal``.
      architecture: what it is assembled for, e.g. ``sm_90a``.
      operation: ``forward``, ``backward_preprocess``, ``backward`` or ``backward_postprocess``.
      select: the properties of a call that it serves (dtype, head_dim, mask, logits); a key that
        is absent does not matter to it.
      threads: threads of a CTA.
      registers: registers per thread at launch.
      shared: bytes of dynamic shared memory.
    """

    name: str
    architecture: str
    operation: str
    select: Mapping[str, str]
    threads: int
    registers: int
    shared: int


def parse_manifest(text: str) -> tuple[KernelInfo, ...]:
    """Reads ``manifest.txt`` (format: ``kernels/abi.py``).

    Args:
      text: the whole file.

    Returns:
      The kernels in the order of the file.

    Raises:
      BundleError: the text is not a manifest that this version can read; names the line.
    """
    lines = text.splitlines()
    if not lines or lines[0].strip() != _MANIFEST_HEADER:
        found = lines[0] if lines else ""
        raise BundleError(f"manifest line 1: expected {_MANIFEST_HEADER!r}, found {found!r}")
    kernels: list[KernelInfo] = []
    fields: dict[str, str] = {}
    select: dict[str, str] = {}
    start = 0
    for number, line in enumerate([*lines[1:], ""], start=2):
        key, _, value = line.strip().partition(" ")
        if not key:
            if fields:
                kernels.append(_kernel_info(fields, select, start))
            fields, select = {}, {}
        elif key == "select":
            name, _, choice = value.partition(" ")
            select[name] = choice
        elif key != "param":
            if not fields:
                start = number
            fields[key] = value
    return tuple(kernels)


def _kernel_info(fields: dict[str, str], select: dict[str, str], start: int) -> KernelInfo:
    try:
        return KernelInfo(
            name=fields["kernel"],
            architecture=fields["architecture"],
            operation=fields["operation"],
            select=select,
            threads=int(fields["threads"]),
            registers=int(fields["registers"]),
            shared=int(fields["shared"]),
        )
    except KeyError as error:
        raise BundleError(f"manifest line {start}: the kernel has no {error} line") from None
    except ValueError as error:
        raise BundleError(f"manifest line {start}: {error}") from None


def directory() -> pathlib.Path:
    """The bundle's directory.

    Raises:
      BundleError: the library or the bundle was not built; says how to build it.
    """
    bundle = _NATIVE / "bundle"
    _require_built(_NATIVE / _LIBRARY)
    _require_built(bundle / "manifest.txt")
    return bundle


def _require_built(path: pathlib.Path) -> None:
    if not path.is_file():
        raise BundleError(
            f"fa4_jax's native part is not built: {path} does not exist. Run `make build` in "
            "the source tree, or install the wheel of fa4-jax-ffi."
        )


def kernels() -> tuple[KernelInfo, ...]:
    """Every kernel of the bundle. Raises :class:`BundleError` as :func:`directory` does."""
    return parse_manifest((directory() / "manifest.txt").read_text())


def architectures() -> tuple[str, ...]:
    """The architectures that the bundle holds, in its order, e.g. ``("sm_90a",)``."""
    return tuple(dict.fromkeys(kernel.architecture for kernel in kernels()))


def library(path: str | None = None) -> ctypes.CDLL:
    """Loads the library, opens the bundle and registers every target; once per process.

    Needs no GPU and no CUDA driver: libcuda is looked for when a program that holds one of the
    custom calls is made ready on a device.

    Args:
      path: the directory of another bundle than the installed one.

    Returns:
      The library, all targets registered for the platforms ``CUDA`` and ``cpu``.

    Raises:
      BundleError: not built, the manifest is not one that this library reads, or ``path`` is
        given and the process has already opened a bundle.
    """
    global _library
    with _lock:
        if _library is not None and path is not None:
            raise BundleError(f"a process opens one bundle; it is too late for {path}")
        if _library is None:
            _require_built(_NATIVE / _LIBRARY)
            bundle = directory() if path is None else path
            loaded = ctypes.CDLL(str(_NATIVE / _LIBRARY))
            loaded.Fa4JaxOpenBundle.argtypes = [ctypes.c_char_p]
            loaded.Fa4JaxOpenBundle.restype = ctypes.c_char_p
            error = loaded.Fa4JaxOpenBundle(str(bundle).encode())
            if error is not None:
                raise BundleError(error.decode())
            for target, stem in _HANDLERS.items():
                for platform, stages in _STAGES.items():
                    handlers = {
                        stage: jax.ffi.pycapsule(getattr(loaded, f"Fa4Jax{stem}{suffix}"))
                        for stage, suffix in stages.items()
                    }
                    jax.ffi.register_ffi_target(target, handlers, platform=platform)
            _library = loaded
        return _library
