"""What the build reads from compiled code and holds against the declaration; needs no DSL."""

from __future__ import annotations

import re
import struct

from . import abi


class CompileError(RuntimeError):
    """The compiled code does not keep what its declaration or the house rules promise."""


def normalise_ptx(ptx: str | bytes) -> str:
    """PTX without what depends on the compiling machine: comments, debug lines, blank lines."""
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    kept = []
    for line in text.rstrip("\0").splitlines():
        code = line.split("//", 1)[0].rstrip()
        if code and not re.match(r"\s*\.(loc|file)\b", code):
            kept.append(code)
    return "\n".join(kept) + "\n"


def check_parameters(spec: abi.KernelSpec, ptx: str) -> str:
    """Compares the PTX entry's parameter list with the declaration.

    Args:
      spec: the declaration.
      ptx: normalised PTX with one entry.

    Returns:
      The entry's name.

    Raises:
      CompileError: names the first parameter that differs.
    """
    entries = re.findall(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", ptx)
    if len(entries) != 1:
        raise CompileError(f"{spec.name}: the PTX has {len(entries)} entries, not one")
    entry, text = entries[0]
    found = []
    for parameter in filter(None, (p.strip() for p in text.split(","))):
        if re.search(r"\.b8\s+[\w$]+\[128\]", parameter):
            found.append(abi.TensorMap)
        elif re.search(r"\.[usb]64\b", parameter):
            found.append(abi.Pointer)
        elif re.search(r"\.[usb]32\b", parameter):
            found.append(abi.S32)
        elif re.search(r"\.f32\b", parameter):
            found.append(abi.F32)
        else:
            raise CompileError(f"{spec.name}: the launcher cannot pass the parameter {parameter}")
    declared = [type(parameter) for parameter in spec.params]
    if found != declared:
        differing = next(
            (i for i, pair in enumerate(zip(found, declared, strict=False)) if pair[0] != pair[1]),
            min(len(found), len(declared)),
        )
        raise CompileError(
            f"{spec.name}: parameter {differing} differs: the code has "
            f"{[t.__name__ for t in found]}, the declaration {[t.__name__ for t in declared]}"
        )
    return entry


# Attributes in a cubin's .nv.info section: format byte, attribute byte, 16-bit size, then the
# value; for these two a symbol index and a number. Not documented by NVIDIA: the numbers are those
# that `cuobjdump -elf` prints as EIATTR_REGCOUNT and EIATTR_FRAME_SIZE.
_FORMAT_SIZED = 4
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11


def resources(cubin: bytes, entry: str) -> tuple[int, int]:
    """Registers and bytes of local memory per thread of one kernel in a cubin (64-bit ELF).

    Raises:
      CompileError: the cubin lacks the entry or its attributes.
    """
    (section_table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQII", cubin, section_table + i * entry_size) for i in range(count)
    ]

    def string(table: int, offset: int) -> str:
        start = headers[table][4] + offset
        return cubin[start : cubin.index(b"\0", start)].decode()

    sections = {string(names_index, header[0]): header for header in headers}
    symbols = sections[".symtab"]
    found: dict[int, int] = {}
    offset, end = sections[".nv.info"][4], sections[".nv.info"][4] + sections[".nv.info"][5]
    while offset < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, offset)
        offset += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute in (_REGCOUNT, _FRAME_SIZE):
            symbol, value = struct.unpack_from("<II", cubin, offset)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + symbol * 24)
            if string(symbols[6], name) == entry:
                found[attribute] = value
        offset += size
    if found.keys() != {_REGCOUNT, _FRAME_SIZE}:
        raise CompileError(f"the cubin states no register count or frame size for {entry}")
    return found[_REGCOUNT], found[_FRAME_SIZE]
