"""What the scripts share beyond the paper, in the order in which to read it.

task.py       what a script provides: the base class of a task
trial.py      one trial: its folder, its checkpoints, the training loop
flags.py      flags, folder names, grids of trials
cli.py        what a command line does; many trials as processes
claims.py     figures and claims as data; statistics, verdicts
tables.py, drawing.py    what is printed and drawn of them
fast.py       common.py's numbers, sooner; graphs.py: on CUDA, in one launch
machine.py, files.py, progress.py, fetch.py    device and engine; files written whole; what is said; downloads
"""

import contextlib
import os
import signal
import sys

__version__ = "1.0"

if sys.version_info < (3, 11):  # noqa: UP036 - said here rather than by whatever fails first
    raise SystemExit(f"Python 3.11 or later is needed; this is {sys.version.split()[0]}")

with contextlib.suppress(AttributeError):  # it is closed, or no file
    # What the terminal's or the log's encoding lacks is shown as \xe9: it must not end a trial.
    sys.stdout.reconfigure(errors="backslashreplace")

with contextlib.suppress(ValueError):  # outside of the main thread nobody hears signals
    # PyTorch takes seconds to import: until cli.py has, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
