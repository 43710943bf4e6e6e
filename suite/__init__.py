"""Signals. Every script imports this before PyTorch, whose import takes a second."""

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


class Stop:
    """What four signals do: end the process or, where they are deferred, set `requested`."""

    requested = is_deferred = False

    def listen(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
                signal.signal(number, self.hear)

    def hear(self, number, frame):
        set_blocking(False)  # from now on a stalled output holds nothing up
        if not self.is_deferred:
            leave(75)
        if self.requested and number == signal.SIGINT:
            leave(130)
        self.requested = True

    @contextlib.contextmanager
    def deferred(self):
        """To the end of this block, which looks at `requested` and saves its work."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False
        if self.requested:
            leave(75)


def set_blocking(blocking):
    """Whether to wait for a stopped terminal or a full pipe."""
    for number in 1, 2:
        with contextlib.suppress(OSError):  # it was closed
            os.set_blocking(number, blocking)


def leave(code):
    """End the process at once: files are written whole or not at all."""
    without = " without --overwrite" if "--overwrite" in sys.argv else ""
    line = f"{Path(sys.argv[0]).name}: stopped; the same command{without} continues\n"
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode(line))
    set_blocking(True)  # the terminal is the shell's, too
    os._exit(code)


stop = Stop()
# Not in a notebook, nor in test_all.py, which have other uses for Ctrl-C; the latter has
# imported PyTorch already
program = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if program.parent == Path(__file__).resolve().parents[1] and "torch" not in sys.modules:
    stop.listen()
