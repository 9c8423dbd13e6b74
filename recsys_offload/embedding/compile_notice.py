"""Says why the first batch takes long, where it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

SECONDS_BEFORE_NOTICE = 1.0


class CompileNotices:
    """Watches the first run of each kind of work: Numba compiles once per machine and keeps the result."""

    def __init__(self) -> None:
        self._compiled: set[str] = set()

    @contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Around work, any but the first of its kind without effect.

        Args:
            what: the kind, for the message.
        """
        if what in self._compiled:
            yield
            return
        message = f"Compiling the embedding {what} for this machine (once; later runs take it from the cache) ..."
        timer = threading.Timer(SECONDS_BEFORE_NOTICE, logger.warning, [message])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._compiled.add(what)
