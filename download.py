"""Files from the network: whole or not at all, continued after a stop, by one process at a time."""

import contextlib
import fcntl
import functools
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter

from common import Refused
from trial import say


class Stopped(Exception):
    """A signal came while there was no trial to save."""


def file_sha256(path):
    return sha256_of(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns)


@functools.cache
def sha256_of(path, size, changed):
    """Size and time of change are arguments for the cache's sake, which serves --all."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(items, counts, size, what, stop):
    """The items; a progress line every five seconds, and an end where a signal came."""
    last = time.monotonic()
    for item in items:
        if stop.requested:
            raise Stopped
        if time.monotonic() - last > 5:
            say(f"{what}: {counts['bytes'] / 1e6:.0f} of {size / 1e6:.0f} MB")
            last = time.monotonic()
        yield item


def take(path):
    """-> the descriptor of the file `path`, created and locked, or None while another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(path)):  # not removed by its last holder
            return file
    os.close(file)
    return None


@contextlib.contextmanager
def alone(path, stop):
    """Hold a lock file, removed afterwards: of several processes one works and the others wait."""
    said = False
    while (file := take(path)) is None:
        if stop.requested:
            raise Stopped
        if not said:
            say(f"waiting for the process that holds {path}")
        said = True
        time.sleep(0.2)
    try:
        yield
    finally:
        path.unlink()
        os.close(file)


def fetch_part(address, part, stop):
    """Download to the file `part`, going on from what is there where the server allows."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "Mozilla/5.0"}  # one host refuses Python's own
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        answer = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        part.unlink()  # nothing lies beyond what we have: it is whole, or not the start of this file
        return fetch_part(address, part, stop)
    with answer, open(part, "ab" if answer.status == 206 else "wb") as file:
        length = answer.headers["Content-Length"]
        size = file.tell() + int(length or 0)
        counts, what = Counter(bytes=file.tell()), f"downloading {address}"
        for block in shown(iter(lambda: answer.read1(2**16), b""), counts, size, what, stop):
            file.write(block)
            counts["bytes"] += len(block)
    if length and counts["bytes"] != size:
        raise OSError(f"{counts['bytes']} of {size} bytes came from {address}; the same command continues")


def fetch(addresses, path, stop, sha256=None):
    """Download the file `path` unless it is there, from the first address that gives it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faults = []
    with alone(path.with_name(f".{path.name}.lock"), stop):
        for address in [] if path.exists() else addresses:
            part = path.with_name(f"{path.name}.{urllib.parse.urlsplit(address).hostname}.part")
            say(f"fetching {address}")
            try:
                fetch_part(address, part, stop)
            except (OSError, http.client.HTTPException) as error:
                if stop.requested:
                    raise Stopped from None
                faults.append(f"{address}: {error}")
                continue
            if sha256 in (None, found := file_sha256(part)):
                part.rename(path)
                return
            faults.append(
                f"{address} holds another text now ({part.stat().st_size:,} bytes, SHA-256 {found})"
            )
            part.unlink()
    if faults:
        raise Refused(f"no download: {'; '.join(faults)} (or bring the file to {path} in another way)")
