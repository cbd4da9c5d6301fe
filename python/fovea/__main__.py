"""The `fovea` command: ``python -m fovea bench``, ``explain``, ``doctor``, ``draw-mask`` ...; ``python -m fovea --help`` lists them.

The command is a program of the wheel's own, which takes the place of this process: signals, exit codes and pipes are its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from ._files import installed


_BENCHMARKS = ("mha", "mha_bwd", "mha_cp", "mha_cp_bwd")  # those of fovea.compat.kvax.benchmarks


def _bench_kvax(words: list[str]) -> int:
    if words[0] not in _BENCHMARKS:
        print(f"fovea bench: {words[0]!r} is no benchmark; expected one of {', '.join(_BENCHMARKS)}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("jax") is None:
        print(f"fovea bench {words[0]}: there is no JAX, on which it runs: pip install jax", file=sys.stderr)
        return 3
    from .compat.kvax import benchmarks

    return benchmarks.main(words)


def main() -> int:
    """Runs the command with the words of ``sys.argv``; does not return unless there is none, or the words are kvax's benchmarks."""
    if sys.argv[1:2] == ["bench"] and sys.argv[2:3] and sys.argv[2].startswith("mha"):
        return _bench_kvax(sys.argv[2:])
    program = installed("bin", "fovea")
    if program is None:
        print("fovea: this build of the package has no command; the wheel has it, or set FOVEA_BUILD_TOOLS=ON", file=sys.stderr)
        return 3
    # Where the command looks for kernel packs and compilers: in the packages of this Python.
    environment = {"VIRTUAL_ENV": sys.prefix, **os.environ}
    sys.stdout.flush()
    os.execve(program, [str(program), *sys.argv[1:]], environment)


if __name__ == "__main__":
    sys.exit(main())
