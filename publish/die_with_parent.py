"""Launcher: become another program that gets a signal when the process that started it dies.

Run by path, in isolation: ``python -I die_with_parent.py PARENT_PID SIGNAL PROGRAM ARG...``. A
launcher instead of ``preexec_fn``, because code between fork and exec can deadlock when the
parent has threads. The kernel keeps the setting over ``exec``. Linux only; elsewhere the program
is started without the binding.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""


def main() -> None:
    """Bind this process to its parent, then replace it by the program named on the command line."""
    parent, signal_number, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it died before the binding was in place
            sys.exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
