"""Long work shows its progress."""

import datetime
import shutil
import sys
import time


def format_eta(seconds):
    """How long it will still take."""
    return f"{datetime.timedelta(seconds=round(seconds))} left"


class LiveLine:
    """On a terminal one line, redrawn each second; elsewhere a line each minute."""

    def __init__(self):
        self.live = sys.stdout.isatty()
        self.due = 0

    def is_due(self):
        return time.monotonic() >= self.due

    def draw(self, text):
        if not self.live:
            self.due = time.monotonic() + 60
            print(text)
            return
        self.due = time.monotonic() + 1
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]:{width}}\r", end="")

    def clear(self):
        """Make room for what is printed next."""
        if self.live:
            self.draw("")
