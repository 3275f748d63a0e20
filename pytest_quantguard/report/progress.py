"""Progress of long work as lines of text: few by default, all of them on request, none where nobody reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

QUIET_SECONDS = 10.0


def seconds_between(verbosity: int, *, watched: bool) -> float:
    """How far apart lines of progress are: on a terminal that somebody watches 10 s, in a log 30 s; less with
    -v, every line with -vv.
    """
    if verbosity > 1:
        return 0.0
    usual = QUIET_SECONDS if watched else 3 * QUIET_SECONDS
    return usual / 3 if verbosity == 1 else usual


@dataclass(slots=True)
class ThrottledLines:
    """Passes a line on if none was passed on for `seconds`; a line that matters goes through `always`."""

    write: Callable[[str], None]
    seconds: float = QUIET_SECONDS
    clock: Callable[[], float] = time.monotonic
    _last: float = field(default=float("-inf"))

    def __call__(self, line: str) -> None:
        """Pass on or drop."""
        if self.clock() - self._last >= self.seconds:
            self.always(line)

    def always(self, line: str) -> None:
        """Pass on."""
        self._last = self.clock()
        self.write(line)
