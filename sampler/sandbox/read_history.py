"""Decides which calls are made before their logits exist."""

from __future__ import annotations

LONGEST_PAUSE = 64
"""Most calls that are made with their logits before the next one is promised them."""


class ReadHistory:
    """Record of the calls of a processor that used the values of logits that they were promised.

    Such a call costs one exchange of messages more than one that has its logits from the beginning. So after each, a
    number of calls is made with logits, twice as many as the last time, up to `LONGEST_PAUSE`.

    Attributes:
        never_promise: True if the class cannot be called before its logits exist.
        num_promised: calls that were promised their logits.
        num_read: those of them that used their values.
    """

    def __init__(self) -> None:
        self.never_promise = False
        self.num_promised = self.num_read = 0
        self._pause = 1
        self._left = 0

    def may_promise(self) -> bool:
        """Return whether the next call should be promised its logits. Called once for each call."""
        if self.never_promise:
            return False
        self._left -= 1
        return self._left < 0

    def observe(self, *, was_read: bool) -> None:
        """Record a call that was promised its logits."""
        self.num_promised += 1
        self.num_read += was_read
        if was_read:
            self._left = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self._left, self._pause = 0, 1
