"""Handle signals; imported before PyTorch, whose import takes a second."""

import contextlib
import os
import signal
import sys
from pathlib import Path


class Interrupts:
    """Signal handler: exit or, while signals are deferred, set `requested`."""

    requested = is_deferred = False

    def install(self):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(signum, self.handle)

    def handle(self, signum, frame):
        set_blocking(False)  # a stalled terminal must not delay the exit
        if not self.is_deferred:
            exit_now(75)
        if self.requested and signum == signal.SIGINT:  # the second Ctrl-C
            exit_now(130)
        self.requested = True

    @contextlib.contextmanager
    def deferred(self):
        """Defer signals to the end of the block, which polls `requested` and saves its work."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False
        if self.requested:
            exit_now(75)


def set_blocking(blocking):
    """Set whether writes to stdout and stderr wait for a stalled terminal or pipe."""
    for fd in 1, 2:
        with contextlib.suppress(OSError):  # the stream is closed
            os.set_blocking(fd, blocking)


def exit_now(code):
    """Exit immediately; safe at any time because file writes are atomic."""
    without = " without --overwrite" if "--overwrite" in sys.argv else ""
    line = f"{Path(sys.argv[0]).name}: stopped; run the same command{without} again to resume\n"
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode(line))
    set_blocking(True)  # the shell shares the terminal
    os._exit(code)


interrupts = Interrupts()
# Only in the suite's scripts: notebooks and test_all.py, which imports PyTorch first, handle
# Ctrl-C themselves
main_script = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if main_script.parent == Path(__file__).resolve().parents[1] and "torch" not in sys.modules:
    interrupts.install()
