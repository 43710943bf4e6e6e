"""Files that are written whole or not at all, locks, and files that were torn."""

from suite.progress import say_once

import contextlib
import errno
import fcntl
import io
import json
import os
import platform
import shutil
import time
import zipfile

import torch

DIVERGED = "not_finite.txt"  # in a trial's folder: when its loss or weights became infinite or NaN


class Torn(Exception):
    """A file that was not written whole, or that was changed since."""


def write(path, content, keep=None, own=""):
    """Replace `path` whole or not at all; what was there before is renamed to `keep`. `own` is a part of the
    temporary file's name."""
    temporary = path.with_name(f".{path.name}{own}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):  # a full disk needs the room
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk names no file


def put(path, content):
    """As `write`, where several processes may write a file at once: each has a temporary one of its own."""
    write(path, content, own=f".{platform.node()}-{os.getpid()}")


def is_of_the_disk(error):
    """Whether the disk failed, full or broken, rather than that a name is wrong."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def write_json(path, content):
    write(path, json.dumps(content, indent=1) + "\n")


def read_json(path, key):
    """The file's dictionary, which has another one under `key`; None where there is none. It raises Torn."""
    try:
        content = json.loads(path.read_text())
        return content | {key: dict(content[key])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Torn(f"{path} cannot be used: {error!r}") from None


def read_usable_json(path, key):
    """As read_json; where the file cannot be used, that is said, and it is as if there were none."""
    try:
        return read_json(path, key)
    except Torn as error:
        say_once(str(error))
        return None


def processes(content):
    """Of a trial's file: what it says of the last process, and of those that trained a part otherwise."""
    return [content, *content.get("earlier", [])]


def finished_metrics(folder):
    """The metrics of a trial that is done, else None."""
    result = read_usable_json(folder / "result.json", "metrics")
    return result and result["metrics"]


NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP  # of Lustre mounted without them, of some NFS


def lock(path):
    """The file `path`, open and locked; None where another process holds it."""
    file = open(path, "a")  # noqa: SIM115 - held until the trial ends
    for wait in (0.2, 0):  # twice, since `python report.py` holds a lock for an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(wait)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            what = "this file system has no locks (flock), which keep two processes from one trial"
            raise OSError(error.errno, what, str(path)) from None
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            return file
    file.close()
    return None


def holder(path):
    """Which process holds a lock, in words."""
    return path.read_text(errors="replace") or "another process"


def is_locked(path):
    """Whether a process holds the lock; looked at for an instant."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file
        pass
    return False


def save_tensors(path, content, keep=None):
    """As `write`, of what torch.save takes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write(path, buffer.getvalue(), keep)


def load_tensors(path, device):
    """The content of a file of save_tensors, once its checksums are right."""
    content = path.read_bytes()
    try:
        damaged = zipfile.ZipFile(io.BytesIO(content)).testzip()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - it is read: whatever is wrong now is wrong with its bytes
        raise Torn(repr(error)) from None
    if damaged is not None:
        raise Torn(f"wrong checksum of {damaged}")
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def clear(folder):
    """Delete all but locks. If that is cut short nothing old comes back: what would be taken for done, or
    continued, goes first, and config.json, which vouches for the rest, last."""
    order = ["result.json", "previous.pt", "last.pt", "", "config.json"]  # "": all others
    place = lambda path: order.index(path.name if path.name in order else "")
    for path in sorted(folder.iterdir(), key=place):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in ("lock", "stability.lock"):
            path.unlink()
