"""Long work shows that it lives: on a terminal by one line, drawn anew each second."""

import datetime
import shutil
import sys
import time


def format_eta(seconds):
    """How long it will still take."""
    if seconds >= 2 * 86_400:
        return f"about {seconds / 86_400:.0f} days left"
    return f"{datetime.timedelta(seconds=round(seconds))} left"


class LiveLine:
    """The line that is drawn anew; where there is no terminal it is never due."""

    def __init__(self):
        self.live = sys.stdout.isatty()
        self.next = 0  # when it is due

    def is_due(self):
        return self.live and time.monotonic() >= self.next

    def draw(self, text):
        self.next = time.monotonic() + 1
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]:{width}}", end="")

    def clear(self):
        """What is printed next begins a line of its own."""
        if self.live:
            self.draw("")
            print("\r", end="")
            self.next = 0
