"""Every script imports this before all else, since PyTorch's import takes a second."""

import contextlib
import os
import signal
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    print(
        "error: Python 3.11 or later is needed, this is",
        *sys.version.split()[:1],
        file=sys.stderr,
    )
    raise SystemExit(2)


def listen(handler):
    """Call handler(number, frame) at the four signals that stop a trial."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
            signal.signal(number, handler)


def leave(number, frame):
    """End at once: before training has begun, and after all is saved."""
    with contextlib.suppress(OSError):  # a full pipe and a stopped terminal included
        os.set_blocking(2, False)
        os.write(2, f"{Path(sys.argv[0]).name}: stopped; the same command continues\n".encode())
    os._exit(75)


# In a script of this folder, until suite.cli listens. Not in a notebook, nor in test_all.py,
# which have other uses for Ctrl-C; the latter has imported PyTorch already
program = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if program.parent == Path(__file__).resolve().parents[1] and "torch" not in sys.modules:
    listen(leave)
