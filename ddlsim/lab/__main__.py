"""``python -m ddlsim.lab FD RANK ADDRESS``: be a rank of a laboratory, which starts this itself.

FD is the pipe to the laboratory; the rank listens at ADDRESS.
"""

import ctypes
import gc
import signal
import sys
from multiprocessing.connection import Connection

from ddlsim.lab.rank import serve

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve until the laboratory closes the pipe, or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()
    descriptor, rank, host = sys.argv[1:]
    serve(Connection(int(descriptor)), int(rank), host)


if __name__ == "__main__":
    main()
