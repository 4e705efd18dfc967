"""Compiles the matrix of kernel variants into a bundle: cubins, PTX and a manifest.

``python -m kernels.build --output DIR`` compiles every variant of every module under ``kernels/``
that defines ``variants()`` (see ``abi.py``), each in a process of its own, and writes::

    DIR/manifest.txt
    DIR/<architecture>/<kernel>.cubin
    DIR/<architecture>/<kernel>.ptx

Results are cached by content: the sources that a kernel's module imports from this package, the
compiler's version and the build's own code. A kernel that spills registers, needs more shared
memory than an SM has, or whose parameters are not those declared, fails the build. No GPU is
needed.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

MANIFEST_HEADER = "fa4_jax-bundle 1"
_PACKAGE_DIRECTORY = pathlib.Path(__file__).resolve().parent
_SUFFIXES = (".cubin", ".ptx", ".manifest")

# CPython 3.11's ast.parse keeps its recursion depth in one place for all threads.
_ast_lock = threading.Lock()


class BuildError(RuntimeError):
    """Some kernels did not compile; the message holds what the compiler said of each."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel to compile: its module below this package, its name and its architecture."""

    module: str
    name: str
    architecture: str


def find_variants() -> list[Variant]:
    """Every variant that the kernel modules declare, the oldest architecture first, then by name.

    Raises:
      BuildError: a module does not import, or two kernels share a name.
    """
    modules = sorted(
        ".".join(path.relative_to(_PACKAGE_DIRECTORY).with_suffix("").parts)
        for path in _PACKAGE_DIRECTORY.glob("sm*/*.py")
        if _defines_variants(path)
    )
    if not modules:
        return []
    listing = _run_compiler(["--list", *modules], architecture=None)
    if listing.returncode != 0:
        raise BuildError(f"cannot list the kernels:\n{listing.stderr}")
    # The DSL may print notes of its own before the last line.
    found = [Variant(*fields) for fields in json.loads(listing.stdout.splitlines()[-1])]
    # The number of sm_90a, so that it comes before sm_100a.
    number = lambda variant: int("".join(filter(str.isdigit, variant.architecture)))  # noqa: E731
    found.sort(key=lambda variant: (number(variant), variant.architecture, variant.name))
    for one, other in itertools.pairwise(found):
        if one.name == other.name:
            raise BuildError(f"two kernels are called {one.name}: {one.module}, {other.module}")
    return found


def build(
    variants: list[Variant],
    output: pathlib.Path,
    *,
    jobs: int,
    cache: pathlib.Path,
) -> None:
    """Compiles the variants, ``jobs`` at a time, and replaces the bundle in ``output``.

    Args:
      variants: what the bundle will hold, no more and no less.
      output: the bundle's directory; replaced only when every kernel has compiled.
      jobs: processes at a time.
      cache: directory of earlier results.

    Raises:
      BuildError: lists every kernel that failed, with the compiler's output.
    """
    cache.mkdir(parents=True, exist_ok=True)
    compiler = compiler_version()
    results: dict[Variant, pathlib.Path] = {}
    failures: list[str] = []
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(_compile_cached, variant, cache, compiler): variant for variant in variants
        }
        for future in concurrent.futures.as_completed(futures):
            variant = futures[future]
            elapsed = time.monotonic() - started
            done = f"[{len(results) + len(failures) + 1:3}/{len(variants)} {elapsed:6.1f} s]"
            try:
                results[variant], how = future.result()
                print(f"{done} {variant.name}: {how}", flush=True)
            except BuildError as error:
                failures.append(str(error))
                print(f"{done} {variant.name}: FAILED", flush=True)
    if failures:
        raise BuildError("\n\n".join(failures))
    _write_bundle({variant: results[variant] for variant in variants}, output)


def compiler_version() -> str:
    """The versions of the distributions that decide what code comes out."""
    names = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13")
    try:
        return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in names)
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError(
            f"building the kernels needs nvidia-cutlass-dsl[cu13]: {error.name} is not installed"
        ) from None


def source_files(module: str) -> list[pathlib.Path]:
    """The files of this package that ``module`` is made of: itself and all it imports, sorted.

    Args:
      module: name below this package, e.g. ``sm90.forward``.
    """
    pending = [_PACKAGE_DIRECTORY.joinpath(*module.split(".")).with_suffix(".py")]
    found: set[pathlib.Path] = set()
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(_parse(path)):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            candidates = [base, *(base / alias.name for alias in node.names)]
            for candidate in candidates:
                for file in (candidate.with_suffix(".py"), candidate / "__init__.py"):
                    if file.is_file():
                        pending.append(file)
    return sorted(found)


def cache_key(variant: Variant, compiler: str) -> str:
    """Equal exactly when a compilation of ``variant`` would give the same result."""
    digest = hashlib.sha256()
    for part in (compiler, variant.architecture, variant.name):
        digest.update(part.encode() + b"\0")
    for path in sorted({*source_files(variant.module), *source_files("compile")}):
        name = str(path.relative_to(_PACKAGE_DIRECTORY))
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{variant.name}-{digest.hexdigest()[:32]}"


def _defines_variants(path: pathlib.Path) -> bool:
    return any(
        isinstance(node, ast.FunctionDef) and node.name == "variants" for node in _parse(path).body
    )


def _parse(path: pathlib.Path) -> ast.Module:
    with _ast_lock:
        return ast.parse(path.read_text())


def _run_compiler(
    arguments: list[str], architecture: str | None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if architecture is not None:
        environment["CUTE_DSL_ARCH"] = architecture
    return subprocess.run(
        [sys.executable, "-m", f"{__package__}.compile", *arguments],
        # Where the package is found from a source tree; harmless when it is installed.
        cwd=_PACKAGE_DIRECTORY.parents[(__package__ or "").count(".")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _compile_cached(
    variant: Variant, cache: pathlib.Path, compiler: str
) -> tuple[pathlib.Path, str]:
    """Returns the directory with the three files of a variant, and one line about it."""
    key = cache_key(variant, compiler)
    entry = cache / key
    how = "cached"
    if not entry.is_dir():
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=cache, prefix="compiling-") as scratch:
            process = _run_compiler([variant.module, variant.name, scratch], variant.architecture)
            if process.returncode != 0:
                said = (process.stdout + process.stderr).strip()
                raise BuildError(f"{variant.name} ({variant.module}) did not compile:\n{said}")
            if cache_key(variant, compiler) != key:
                raise BuildError(f"{variant.name}: its sources changed while it was compiled")
            finished = pathlib.Path(scratch) / "finished"
            finished.mkdir()
            for suffix in _SUFFIXES:
                (pathlib.Path(scratch) / f"{variant.name}{suffix}").rename(
                    finished / f"{variant.name}{suffix}"
                )
            try:
                finished.rename(entry)
            except OSError:
                if not entry.is_dir():  # else another build finished the same kernel first
                    raise
        how = f"{time.monotonic() - started:.1f} s"
    manifest = (entry / f"{variant.name}.manifest").read_text()
    sizes = [line for line in manifest.splitlines() if line.startswith(("registers", "shared"))]
    return entry, f"{', '.join(sizes)} ({how})"


def _write_bundle(results: dict[Variant, pathlib.Path], output: pathlib.Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    staging.chmod(0o755)
    try:
        blocks = [f"{MANIFEST_HEADER}\n"]
        for variant, entry in results.items():
            directory = staging / variant.architecture
            directory.mkdir(exist_ok=True)
            for suffix in (".cubin", ".ptx"):
                shutil.copy(entry / f"{variant.name}{suffix}", directory)
            blocks.append((entry / f"{variant.name}.manifest").read_text())
        (staging / "manifest.txt").write_text("\n".join(blocks))
        if output.exists():
            shutil.rmtree(output)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def default_cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "fa4_jax" / "kernels"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.build", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the bundle's directory")
    parser.add_argument(
        "--architectures", nargs="+", metavar="ARCH", help="only these, e.g. sm_90a (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: cores)"
    )
    parser.add_argument("--only", metavar="GLOB", default="*", help="only kernels named like this")
    parser.add_argument(
        "--cache", type=pathlib.Path, default=default_cache(), help="default: %(default)s"
    )
    options = parser.parse_args()
    try:
        variants = find_variants()
        missing = set(options.architectures or ()) - {v.architecture for v in variants}
        if missing:
            raise BuildError(f"no kernel is written for {', '.join(sorted(missing))}")
        chosen = [
            variant
            for variant in variants
            if fnmatch.fnmatchcase(variant.name, options.only)
            and (not options.architectures or variant.architecture in options.architectures)
        ]
        if not chosen:
            raise BuildError(f"no kernel is named like {options.only!r}")
        build(chosen, options.output.resolve(), jobs=options.jobs, cache=options.cache.resolve())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
