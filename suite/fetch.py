"""Files from the network: whole or not at all."""

from suite import files
from suite.progress import say

import hashlib
import http.client
import urllib.request

from common import Refused


def fetch(addresses, path, is_whole):
    """Download the file `path`, unless it is there, from the first address whose content `is_whole`."""
    if path.exists():
        return
    faults, browser = [], {"User-Agent": "Mozilla/5.0"}  # one host refuses Python
    for address in addresses:
        say(f"fetching {address}")
        request = urllib.request.Request(address, headers=browser)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content = answer.read()  # it fails where less comes than was announced
        except (OSError, http.client.HTTPException) as error:
            faults.append(f"{address}: {error}")
            continue
        if is_whole(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.put(path, content)
            return
        faults.append(f"{address}: another file, of SHA-256 {hashlib.sha256(content).hexdigest()}")
    raise Refused(f"no download: {'; '.join(faults)} (or bring the file to {path} in another way)")
