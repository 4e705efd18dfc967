"""``python -m fa4_jax COMMAND``: what is installed, what it would do, and whether it is right."""

from __future__ import annotations

import importlib
import sys

# Command -> module whose `main(argv) -> exit status` runs it, and what it is for. Modules are
# imported on demand: each brings what the others do not need.
COMMANDS = {
    "info": ("fa4_jax.info", "versions, devices, kernels, and what serves a given call"),
    "accuracy": ("fa4_jax.accuracy", "quantised attention beside float64 and published figures"),
    "check": ("fa4_jax.check", "a small forward and backward of every implementation"),
    "emulate": ("fa4_jax.emulate", "a call's kernels on the emulator: seeds, races, counts"),
}


def usage() -> str:
    lines = (f"  {name:<9}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return "usage: python -m fa4_jax COMMAND [--help] ...\n\n" + "\n".join(lines)


def main(argv: list[str]) -> int:
    """Runs ``argv[0]`` with the rest as its arguments; returns the exit status."""
    if argv and argv[0] in COMMANDS:
        module, _ = COMMANDS[argv[0]]
        return importlib.import_module(module).main(argv[1:])
    wanted_help = argv in (["-h"], ["--help"])
    print(usage(), file=sys.stdout if wanted_help else sys.stderr)
    return 0 if wanted_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
