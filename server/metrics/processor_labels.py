"""What processors are called in metrics: a bounded number of names, whatever clients call theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MOST_NAMES = 100
"""Names of shipped processors that get a time series of their own."""
OTHER = "other"
"""Stands for all names beyond that."""
_LONGEST_NAME = 80
"""Characters."""


@dataclass(frozen=True)
class ProcessorLabel:
    """How metrics name a processor.

    Attributes:
        name: its name, cut; or `OTHER`.
        origin: `installed`, or `shipped` by a request (or named by one, as a callable). A client may name its class as
            it likes: the origin tells it from the installed one of that name.
    """

    name: str
    origin: Literal["installed", "shipped"]


class ProcessorLabels:
    """Labels for processors. For one thread.

    Args:
        installed: digest → name of those that are installed.
        most_names: how many names of others get a label of their own, first come, first served.
    """

    def __init__(self, installed: Mapping[str, str], most_names: int = MOST_NAMES) -> None:
        self._installed = {digest: ProcessorLabel(name, "installed") for digest, name in installed.items()}
        self._shipped: dict[str, ProcessorLabel] = {}
        self._most_names = most_names
        self._other = ProcessorLabel(OTHER, "shipped")

    def of(self, digest: str, name: str) -> ProcessorLabel:
        """The label of a processor: the same object for the same label."""
        installed = self._installed.get(digest)
        if installed is not None:
            return installed
        name = name[:_LONGEST_NAME]
        known = self._shipped.get(name)
        if known is None:
            if len(self._shipped) >= self._most_names:
                return self._other
            known = self._shipped[name] = ProcessorLabel(name, "shipped")
        return known
