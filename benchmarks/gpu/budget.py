"""How much time is left."""

from __future__ import annotations

import time


class Budget:
    """Seconds that may be spent from now on, or until the budget that this is a share of ends, if that is earlier."""

    def __init__(self, seconds: float, within: Budget | None = None) -> None:
        self._end = time.monotonic() + seconds
        if within is not None:
            self._end = min(self._end, within._end)

    @property
    def left(self) -> float:
        """Seconds, negative when it is overdrawn."""
        return self._end - time.monotonic()

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0
