"""Says what is waited for while one request takes long, from the thread that waits.

Only the caller's own thread writes: a line between tests passes pytest's capture as any other does, and
nothing is written behind the back of whoever writes at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

BEAT_SECONDS = 10.0
"""How often a waiting thread speaks; who passes its lines on may do so more rarely."""

Progress = Callable[[str], None]
T = TypeVar("T")


def awaited(work: Callable[[], T], what: str, progress: Progress | None) -> T:
    """What `work()` returns or raises. While it runs, in a thread of its own, `progress` hears now and then
    that `what` is waited for, and for how long. Without `progress` it simply runs.

    An interrupt ends the waiting at once; the work is left behind and ends with its server.
    """
    if progress is None:
        return work()
    returned: list[T] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="quantguard-request", daemon=True).start()
    began = time.monotonic()
    while not done.wait(BEAT_SECONDS):
        progress(f"{what}: no answer yet, {duration(time.monotonic() - began)} after the request")
    if raised:
        raise raised[0]
    return returned[0]


def duration(seconds: float) -> str:
    """Seconds for people: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
