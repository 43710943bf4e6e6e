"""Every script imports this before all else, since PyTorch's import takes a second."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    print(
        "error: Python 3.11 or later is needed, this is",
        *sys.version.split()[:1],
        file=sys.stderr,
    )
    raise SystemExit(2)
