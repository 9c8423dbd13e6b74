"""Ctrl-C and SIGTERM, obeyed at the next step boundary."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest", "StopRequested"]

EXIT_CODE = 130
_SHOW_CURSOR = "\x1b[?25h"  # a live progress line hides it


class StopRequested(Exception):
    """The user has asked training to end."""


class StopRequest:
    """While this context manager is open, a first SIGINT or SIGTERM is noted and a second one ends the process.

    Outside the main thread, where Python handles no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def raise_if_requested(self) -> None:
        """Call this where it is safe to stop.

        Raises:
            StopRequested: a signal has come.
        """
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
            os._exit(EXIT_CODE)
        self.requested = True
        notice = "\nStopping at the next step boundary with a checkpoint; once more ends at once.\n"
        os.write(2, notice.encode())  # a handler may have interrupted a print, so it must not print

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
