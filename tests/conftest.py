"""What all tests need: signals as they are in a terminal."""

import signal


def pytest_configure():
    """Take SIGINT again where a shell has started the tests in the background.

    Such a shell makes them ignore it, and with them every process that they start and interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
