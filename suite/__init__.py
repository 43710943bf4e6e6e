"""What the scripts share beyond the paper, in the order in which to read it.

task.py       what a script provides: the base class of a task
trial.py      one trial: its folder, its checkpoints, the training loop
flags.py      flags, folder names, grids of trials
cli.py        what a command line does; many trials as processes
claims.py     figures and claims as data; statistics, verdicts
tables.py     what is read of a trial, and printed of a figure
drawing.py    pictures
fast.py       common.py's numbers, faster
sweeps.py     ... of GRU and LSTM, through time and back
scan.py       ... of Mamba
compiling.py  torch.compile: for what, and whether it works
graphs.py     CUDA graphs: a step in one launch
machine.py    device, engine, memory, and what is recorded of them
files.py      files that are written whole or not at all, locks
progress.py   what is said while a trial runs
fetch.py      downloads
"""

import contextlib
import os
import signal
import sys

__version__ = "1.0"

if sys.version_info < (3, 11):  # noqa: UP036 - said here rather than by whatever fails first
    raise SystemExit(f"Python 3.11 or later is needed; this is {sys.version.split()[0]}")


def interrupt(number, frame):
    """Ctrl-C. While modules are imported, which takes seconds, it ends the process without a traceback."""
    while frame:
        if "importlib" in frame.f_code.co_filename:
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


# A standard stream that is closed leaves its number to the next file, such as a checkpoint.
while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
    pass
os.close(opened)

if not os.environ.get("OMP_NUM_THREADS"):  # an empty one, of a variable that was not set, counts as none
    os.environ.pop("OMP_NUM_THREADS", None)

with contextlib.suppress(AttributeError):  # it is closed, or no file
    # What the terminal's or the log's encoding lacks is shown as \xe9: it must not end a trial.
    sys.stdout.reconfigure(errors="backslashreplace")

# This is why a script imports `suite` before all else.
if not hasattr(sys, "ps1"):  # a notebook or another interpreter goes on after Ctrl-C
    with contextlib.suppress(ValueError):  # outside of the main thread nobody hears signals
        signal.signal(signal.SIGINT, interrupt)

for file in os.listdir(os.path.dirname(os.path.dirname(__file__))):
    stem, extension = os.path.splitext(file)
    if extension == ".py" and stem in sys.stdlib_module_names:  # torch would import a task's copy.py for that
        raise SystemExit(f"{file} has the name of a module of Python's own: rename it")
