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
        self.live, self.due = sys.stdout.isatty(), 0

    def update(self, format_text):
        """Show format_text() when it is due."""
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + (1 if self.live else 60)
            self.show(format_text())

    def show(self, text):
        if not self.live:
            print(text)
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]:{width}}\r", end="")

    def clear(self):
        """Make room for what is printed next."""
        if self.live:
            self.show("")
