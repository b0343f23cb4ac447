"""The largest contents of a processor string that is too long.

This module imports dill; it is imported only for such a string.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from logitship.client.errors import LARGE_PROCESSOR_ADVICE, MAX_PROCESSOR_SIZE_FLAG

from .pickling.class_pickler import ClassPickler
from .serialize import own_packages

_SHOWN = 3
_MIN_SHARE = 0.05
"""Smallest share of the string that is reported."""


@dataclass(frozen=True)
class Content:
    """An object in a processor string.

    Attributes:
        label: where it is used, such as "global 'W' used by Ban.__call__".
        kind: its kind, such as "a tensor, float32 [50000]".
        size: characters that it takes, without the other contents inside of it.
        advice: how to do without it; "" if there is no special way.
    """

    label: str
    kind: str
    size: int
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.label}, {self.kind} ({self.size:,} bytes)"
        return f"{text}: {self.advice}" if self.advice else text


def too_large_message(cls: type, size: int, limit: int) -> str:
    """Return the message for a class whose string is too long.

    Args:
        cls: the class.
        size: bytes of its string.
        limit: most bytes of a string that the server takes.
    """
    largest = "; ".join(map(str, largest_contents(cls)))
    return (
        f"the processor string of class {cls.__qualname__} has {size:,} bytes, and the server takes at most {limit:,} "
        f"({MAX_PROCESSOR_SIZE_FLAG}). Its largest contents: {largest}; {LARGE_PROCESSOR_ADVICE}"
    )


def largest_contents(cls: type) -> list[Content]:
    """Return the largest contents of a class's string, the largest first."""
    pickler = _MeasuringPickler(io.BytesIO(), own_packages(cls))
    pickler.dump_class(cls)
    by_size = sorted(pickler.contents, key=lambda each: -each.size)
    least = _MIN_SHARE * sum(each.size for each in by_size)
    return [by_size[0], *(each for each in by_size[1:_SHOWN] if each.size >= least)]


class _MeasuringPickler(ClassPickler):
    """Pickler that measures the objects that its error messages can name.

    Attributes:
        contents: the objects, as they are finished.
    """

    def __init__(self, file: io.BytesIO, own_packages: Iterable[str]) -> None:
        super().__init__(file, own_packages)
        self.contents: list[Content] = []
        self._file = file
        self._inside = 0

    @contextmanager
    def at(self, label: str, value: Any) -> Iterator[None]:
        """See `BasePickler.at`."""
        start, outside, self._inside = self._position(), self._inside, 0
        with super().at(label, value):
            yield
        total = self._position() - start
        # Two hexadecimal digits for each byte.
        kind, advice = _kind_and_advice(value)
        self.contents.append(Content(label, kind, 2 * (total - self._inside), advice))
        self._inside = outside + total

    def _position(self) -> int:
        frame = self.framer.current_frame
        return self._file.tell() + (0 if frame is None else frame.tell())


def _kind_and_advice(value: Any) -> tuple[str, str]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return f"a tensor, {str(value.dtype).removeprefix('torch.')} {list(value.shape)}", ""
    if numpy is not None and isinstance(value, numpy.ndarray):
        return f"an array, {value.dtype} {list(value.shape)}", ""
    if any(base.__name__ == "PreTrainedTokenizerBase" for base in type(value).__mro__):
        return "a tokenizer", "use `__req__.tokenizer`"
    if isinstance(value, dict | list | tuple | set | frozenset | str | bytes):
        return f"{type(value).__name__} of length {len(value):,}", ""
    return type(value).__name__, ""
