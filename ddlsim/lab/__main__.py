"""``python -m ddlsim.lab FD RANK ADDRESS CONGESTION``: one rank of a laboratory, started by the laboratory.

FD is the pipe to the laboratory; the rank listens at ADDRESS. CONGESTION is the congestion control of its connections.
"""

import ctypes
import gc
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from ddlsim.lab.rank import serve

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NICE = -15


def main() -> None:
    """Serve until the laboratory closes the pipe, or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()
    with suppress(OSError):  # other programs on the computer must not be affected
        os.nice(_NICE)
    descriptor, rank, host, congestion = sys.argv[1:]
    serve(Connection(int(descriptor)), int(rank), host, congestion)


if __name__ == "__main__":
    main()
