"""Line profiler for the author's code.

Measures in this process, by tracing: it reads the clock at each line. This adds about a microsecond to each execution
of a line, but does not change which lines are the slowest.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any, TypeAlias

import torch

from logitship.client.check_report import SlowLine
from logitship.client.serialization.code_names import reached_functions
from logitship.client.serialization.provenance import is_installed, top_level
from logitship.client.serialization.serialize import own_packages

from .dry_run import DryRun
from .local_timing import median_seconds
from .replayed_calls import Recording

_MAX_LINES = 2
_MIN_SHARE = 0.1

Location: TypeAlias = tuple[str, int]


class LineProfiler:
    """Sums the time of each line of the author's code, excluding calls to other functions of the author.

    Args:
        own_packages: installed packages that count as the author's code.
    """

    def __init__(self, own_packages: Collection[str] = ()) -> None:
        self._own_packages = own_packages
        self.seconds: defaultdict[Location, float] = defaultdict(float)
        self._running: list[Location] = []
        self._last = 0.0
        self._own: dict[str | None, bool] = {}

    def __enter__(self) -> LineProfiler:
        self._previous = sys.gettrace()
        self._last = time.perf_counter()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a new frame (called by the interpreter). The return value traces its lines."""
        if not self.is_own(str(frame.f_globals.get("__name__"))):
            return None
        self._tick()
        self._running.append((frame.f_code.co_filename, frame.f_lineno))
        self._last = time.perf_counter()
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._tick()
        if event == "line":
            self._running[-1] = (frame.f_code.co_filename, frame.f_lineno)
        elif event == "return" and self._running:
            self._running.pop()
        self._last = time.perf_counter()
        return self._trace

    def _tick(self) -> None:
        """Add the time since the last event to the running line."""
        if self._running:
            self.seconds[self._running[-1]] += time.perf_counter() - self._last

    def is_own(self, module_name: str | None) -> bool:
        """Return whether a module is the author's."""
        if module_name not in self._own:
            top = top_level(module_name or "")
            # `is_installed` is False for logitship itself, which is the author's code only if `own_packages` says so.
            is_others = top == "logitship" or is_installed(module_name)
            self._own[module_name] = top in self._own_packages or not is_others
        return self._own[module_name]


def measure_lines(cls: type, dry_run: DryRun, recordings: Sequence[Recording], logits: torch.Tensor) -> list[SlowLine]:
    """Return the slowest lines, the slowest first; none if a call fails.

    Tracing gives their shares of the time. The time of a call is measured without tracing.

    Args:
        cls: the author's class, which has the paths of its files: deserialized code has only the file names.
        dry_run: the processor in this process.
        recordings: give the sequences their parameters and prompts.
        logits: float32 [rows, vocab].
    """
    untraced = median_seconds(dry_run, recordings, logits)
    clock = LineProfiler(own_packages(cls))
    if untraced is None or median_seconds(dry_run, recordings, logits, profiler=clock) is None:
        return []
    files = [each.__code__.co_filename for each in reached_functions(cls, clock.is_own)]
    paths = {PurePath(file).name: file for file in files}
    return _slowest(clock.seconds, untraced / len(logits) * 1e6, paths)


def _slowest(seconds: dict[Location, float], microseconds: float, files: dict[str, str]) -> list[SlowLine]:
    """Return the slowest lines.

    Args:
        seconds: by file and line.
        microseconds: of all lines, per row.
        files: paths by file name.
    """
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])[:_MAX_LINES]
    lines = []
    for (name, line), spent in ordered:
        path, share = files.get(name, name), spent / total
        if share >= _MIN_SHARE:
            text = linecache.getline(path, line).strip()
            lines.append(SlowLine(path, line, text, round(share, 4), round(share * microseconds, 2)))
    return lines
