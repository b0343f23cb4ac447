"""Labels of processors in metrics: a bounded number, however many names clients use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MOST_NAMES = 100
"""Most names of shipped processors with a label of their own."""
OTHER = "other"
"""Label of what would need too many labels: further names, unknown HTTP methods, paths without a route."""
_LONGEST_NAME = 80
"""Characters."""


@dataclass(frozen=True)
class ProcessorLabel:
    """The labels of a processor.

    Attributes:
        name: its name, truncated; or `OTHER`.
        origin: `installed`, or `shipped` by a request (or a callable that one names). It tells a shipped processor from
            an installed one of the same name.
    """

    name: str
    origin: Literal["installed", "shipped"]


class ProcessorLabels:
    """Assigns labels to processors. Not thread-safe.

    Args:
        installed: digest → name of the installed processors.
        most_names: how many names of shipped processors get a label of their own, first come, first served.
    """

    def __init__(self, installed: Mapping[str, str], most_names: int = MOST_NAMES) -> None:
        self._installed = {digest: ProcessorLabel(name, "installed") for digest, name in installed.items()}
        self._shipped: dict[str, ProcessorLabel] = {}
        self._most_names = most_names
        self._other = ProcessorLabel(OTHER, "shipped")

    def label(self, digest: str, name: str) -> ProcessorLabel:
        """Return the label of a processor: the same object for the same label."""
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
