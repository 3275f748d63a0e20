"""SIGTERM ends a session with gates as Ctrl-C does: CI systems send it to a job that runs too long.

Python's own way is to die at once, without a summary, a line in the history, or the last results.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest


class Termination:
    """Hooks that take SIGTERM from the session's start to its end, in controller and workers.

    Where somebody else handles or ignores the signal already, that stays as it is. Once the session is
    finishing, for whatever reason, another signal does not disturb it: CI systems send SIGINT first.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._installed = False
        self._finishing = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Take the signal; only the main thread may."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, self._interrupt)
            self._installed = True

    def pytest_keyboard_interrupt(self) -> None:
        """The session ends now."""
        self._finishing = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """The session ends now."""
        self._finishing = True

    def pytest_unconfigure(self) -> None:
        """Give the signal back."""
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork of this process: not the session, so it dies as it would
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._finishing:
            self._finishing = True
            raise KeyboardInterrupt("SIGTERM received")
