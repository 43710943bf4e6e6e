"""Progress display."""

import datetime
import shutil
import sys
import time


def format_time_left(seconds):
    """Return the time left as text."""
    return f"{datetime.timedelta(seconds=round(seconds))} left"


class ProgressLine:
    """A progress line: redrawn every second on a terminal, printed every minute elsewhere."""

    def __init__(self):
        self.is_terminal, self.next_update = sys.stdout.isatty(), 0

    def update(self, format_text):
        """Show format_text() if the interval has passed."""
        if time.monotonic() >= self.next_update:
            self.next_update = time.monotonic() + (1 if self.is_terminal else 60)
            self.show(format_text())

    def show(self, text):
        if not self.is_terminal:
            print(text)
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]:{width}}\r", end="")

    def clear(self):
        """Clear the line before other output."""
        if self.is_terminal:
            self.show("")
