"""The `fovea` command: ``python -m fovea bench``, ``explain``, ``doctor``, ``draw-mask`` ...; ``python -m fovea --help`` lists them.

The command is a program of the wheel's own, which takes the place of this process: signals, exit codes and pipes are its own.
"""

from __future__ import annotations

import os
import sys

from ._files import installed


def main() -> int:
    """Runs the command with the words of ``sys.argv``; does not return unless there is none."""
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
