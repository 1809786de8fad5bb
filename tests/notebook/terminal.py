"""A terminal that keeps what is drawn."""

import io


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self):
        return True

    @property
    def drawn(self):
        return [line.rstrip() for line in self.getvalue().split("\r")[1:]]
