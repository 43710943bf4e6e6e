"""Files of a trial: atomic writes, checked reads and locks. Exit codes of a process."""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil

import torch

from common import UsageError
from suite.figures import chance

# Exit codes besides 0, 75 and 130 (cli.EXIT_CODES). --all returns the largest of its trials'
FAILED, BAD_FLAGS, NOT_FINITE, FOLDER_UNAVAILABLE = 1, 2, 3, 73


class Exit(Exception):
    """Ends the process; its arguments are an exit code and a one-line message."""


class Corrupt(Exit):
    """A checkpoint does not match its checksum."""


# -- Writing and reading
def write(path, content, keep_as=None, durable=True):
    """Write `path` atomically, with fsync if `durable`; rename the old file to `keep_as`."""
    require_same_folder(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if keep_as and path.exists():
            os.replace(path, keep_as)
        os.replace(temporary, path)
        if durable:
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)  # frees space if the disk is full


def write_json(path, content, durable=True):
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError:
        raise Exit(NOT_FINITE, f"non-finite number in {path}") from None
    write(path, f"{text}\n".encode(), durable=durable)


@contextlib.contextmanager
def prefix_errors(path):
    """Prefix a UsageError's message with the path; turn other exceptions into an Exit."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path} {error} (--overwrite starts over)") from None
    except Exception as error:  # noqa: BLE001
        raise Exit(FAILED, f"{path} cannot be read: {error!r}") from None


def read_json(path):
    """Return the dictionary in a JSON file; None if there is no such file."""
    with prefix_errors(path), contextlib.suppress(FileNotFoundError):
        content = json.loads(path.read_text())
        content.keys()  # raises unless it is a dictionary
        return content


def save(path, content, keep_as=None):
    """Write a checkpoint, followed by its SHA-256."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    saved = buffer.getvalue()
    write(path, saved + hashlib.sha256(saved).digest(), keep_as)


def load(path, device):
    """Read a checkpoint; raise Corrupt if its checksum differs."""
    content = path.read_bytes()
    saved, digest = content[:-32], content[-32:]
    if hashlib.sha256(saved).digest() != digest:
        raise Corrupt(FAILED, f"{path} is corrupt")
    with prefix_errors(path):
        return torch.load(io.BytesIO(saved), map_location=device, weights_only=True)


# -- A trial's folder
LOCKS = {}  # {folder: open lock file} of the trials of this process


def require_same_folder(path):
    """Raise Exit if `path` is in a locked folder that was deleted, renamed or replaced."""
    for folder, file in LOCKS.items():
        if path.is_relative_to(folder):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
                    continue
            message = f"{folder} was deleted or renamed; stopping without saving"
            raise Exit(FOLDER_UNAVAILABLE, message)


@contextlib.contextmanager
def lock(folder):
    """Create a trial's folder and lock it against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Exit(FOLDER_UNAVAILABLE, f"{folder} is in use by another process") from None
        LOCKS[folder] = file
        try:
            yield
        finally:
            del LOCKS[folder]


def clear(folder):
    """Delete a trial's files, results first, so that a partial one cannot look finished."""
    results, checkpoints = ("result.json", "stability.json"), ("previous.pt", "last.pt")
    others = "curve.csv", "config.json", "progress.json"
    for name in results + checkpoints + others:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "snapshots", ignore_errors=True)


def text_hashes(config):
    """Return the hashes of the text in a language model's config."""
    return {name: x for name, x in config.items() if name.endswith("_sha256")}


def require_same_flags(stored, ours):
    """Raise UsageError if flags differ; `prefix_errors` adds the file to the message."""
    # report.py does not read the text, so our flags lack its hashes and take those of the file
    ours = text_hashes(stored) | ours
    names = sorted(stored.keys() | ours.keys())
    changed = [name for name in names if stored.get(name) != ours.get(name)]
    if changed:
        diff = ", ".join(f"{k} {stored.get(k)} in the file, not {ours.get(k)}" for k in changed)
        raise UsageError(f"was made with different flags or text: {diff}")


def require_same_trial(content, task):
    """Raise UsageError if a file belongs to another trial."""
    stored = content["config"] | {"task": content["task"]}
    require_same_flags(stored, task.config | {"task": task.name})


def can_skip(task):
    """Return whether a result exists and neither --overwrite nor --evaluate is given."""
    if task.args.overwrite or task.args.evaluate:
        return False
    path = task.folder / task.result_file
    content = read_json(path)
    if content is not None:
        with prefix_errors(path):
            require_same_trial(content, task)
    return content is not None


def print_result(task):
    """Print examples and metrics; return exit code 0."""
    path = task.folder / "result.json"
    result = read_json(path)
    with prefix_errors(path):
        for example in result.get("examples", []):
            print_example(**example)
        print("metrics:")
        for name, value in result["metrics"].items():
            if isinstance(value, int | float):
                note = f" (chance: {chance(task):.3g})" if name == "token_accuracy" else ""
                label = name.replace("damerau_levenshtein", "edit distance").replace("_", " ")
                number = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
                print(f"{label}: {number}{note}")
    return 0


def print_example(inputs, targets, predictions):
    """Print the first 16 tokens of an example; stars mark wrong predictions."""
    print(f"test example{', first 16 tokens' if len(inputs) > 16 else ''} (* = wrong)")
    marked = [x if x == target else f"{x}*" for x, target in zip(predictions, targets)]
    width = max(len(str(x)) for x in (*inputs, *marked))
    for name, row in dict(input=inputs, target=targets, predicted=marked).items():
        print(f"{name:9}", *[f"{x!s:<{width}}" for x in row[:16]])
