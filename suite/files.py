"""The files of a trial's folder: written whole or not at all, checked when read. Exit codes."""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil

import torch

from common import UsageError

FAILED, BAD_FLAGS, NOT_FINITE, RUNNING_ELSEWHERE, STOPPED = 1, 2, 3, 73, 75  # 0: done


class End(Exception):
    """The trial ends here: an exit code and a line that says why."""


class Damaged(End):
    """A checkpoint is not what was written."""


# -- Writing and reading
def write(path, content, keep=None, durable=True):
    """Replace `path`; what was there before becomes `keep`. A durable file survives a power
    cut."""
    require_lock(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if keep and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        if durable:
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)  # a full disk needs the room


def write_json(path, content, durable=True):
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError:
        raise End(NOT_FINITE, f"a number is not finite: {path}") from None
    write(path, f"{text}\n".encode(), durable=durable)


@contextlib.contextmanager
def naming(path):
    """Name the file that cannot be used, whatever is wrong with its content."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path} {error} (--overwrite starts anew)") from None
    except Exception as error:  # noqa: BLE001
        raise End(FAILED, f"{path} cannot be read: {error!r}") from None


def read_json(path):
    """None where there is no such file."""
    with naming(path), contextlib.suppress(FileNotFoundError):
        content = json.loads(path.read_text())
        content.keys()  # it is a dictionary
        return content


def save(path, content, keep=None):
    """What torch.save writes, and then its SHA-256."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    saved = buffer.getvalue()
    write(path, saved + hashlib.sha256(saved).digest(), keep)


def load(path, device):
    content = path.read_bytes()
    saved, digest = content[:-32], content[-32:]
    if hashlib.sha256(saved).digest() != digest:
        raise Damaged(FAILED, f"{path} is damaged")
    with naming(path):
        return torch.load(io.BytesIO(saved), map_location=device, weights_only=True)


# -- A trial's folder
LOCKS = {}  # {folder: its open lock file} of the trials that this process writes


def require_lock(path):
    """End the trial if its folder was deleted or renamed: what is there now is another's."""
    for folder, file in LOCKS.items():
        if path.is_relative_to(folder):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
                    continue
            raise End(RUNNING_ELSEWHERE, f"{folder} was deleted or renamed; nothing is saved")


@contextlib.contextmanager
def lock(folder):
    """Create the folder, and keep other processes from it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise End(RUNNING_ELSEWHERE, f"{folder}: another process runs this trial") from None
        LOCKS[folder] = file
        try:
            yield
        finally:
            del LOCKS[folder]


def clear(folder):
    """Results first: a delete cut short never looks like a finished trial."""
    results, checkpoints = ("result.json", "stability.json"), ("previous.pt", "last.pt")
    others = "curve.csv", "config.json", "progress.json"
    for name in results + checkpoints + others:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "snapshots", ignore_errors=True)


def fingerprints(config):
    """The hashes of a language model's text, which a report does not know."""
    return {name: x for name, x in config.items() if name.endswith("_sha256")}


def require_flags(theirs, ours):
    """Refuse a file that was edited, or copied from another trial."""
    ours = fingerprints(theirs) | ours
    names = sorted(theirs.keys() | ours.keys())
    differ = [name for name in names if theirs.get(name) != ours.get(name)]
    if differ:
        what = ", ".join(f"{k} {theirs.get(k)} there, {ours.get(k)} here" for k in differ)
        raise UsageError(f"was made with other flags or another text: {what}")


def require_trial(content, task):
    """Refuse a file of another trial."""
    theirs = content["config"] | {"task": content["task"]}
    require_flags(theirs, task.config | {"task": task.name})


def is_finished(task):
    """Whether there is a result to keep."""
    if task.args.overwrite or task.args.evaluate:
        return False
    path = task.folder / task.file
    content = read_json(path)
    if content is not None:
        with naming(path):
            require_trial(content, task)
    return content is not None


def show(task):
    """Print the metrics -> 0."""
    print(f"{task.folder} is finished")
    path = task.folder / "result.json"
    result = read_json(path)
    with naming(path):
        for example in result.get("examples", []):
            show_example(**example)
        for name, value in result["metrics"].items():
            if isinstance(value, int | float):
                print(f"{name.replace('_', ' ')}: {value:.6g}")
    return 0


def show_example(read, wanted, answered):
    """The first ten integers of each; a wrong answer is marked by a star."""
    marked = [x if x == target else f"{x}*" for x, target in zip(answered, wanted)]
    for name, row in dict(read=read, wanted=wanted, answered=marked).items():
        print(f"{name:8}", *[f"{x:<6}" for x in row[:10]])
