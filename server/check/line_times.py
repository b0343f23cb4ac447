"""Which lines of an author's code take the time?

Measured in this process, by tracing: a look at the clock at each line. That makes short lines look longer than they
are, by about a microsecond each time that they run, but the slowest ones are the slowest ones.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from logitship.client.check_report import SlowLine
from logitship.client.serialization.code_names import functions_in, functions_of, global_names
from logitship.client.serialization.provenance import is_installed, top_level
from logitship.client.serialization.serialize import own_packages

from .dry_run import DryRun
from .own_time import SECONDS, WARM_UP, one_thread, own_seconds, take_tokens
from .recording import Recording

_MOST_CALLS = 20
_MOST_LINES = 2
_LEAST_SHARE = 0.1

Place: TypeAlias = tuple[str, int]


class LineClock:
    """Adds up the time of each line, without that of the lines of other functions of the author's that it calls.

    Args:
        own_packages: installed packages that are the author's too.
    """

    def __init__(self, own_packages: Collection[str] = ()) -> None:
        self._own_packages = own_packages
        self.seconds: defaultdict[Place, float] = defaultdict(float)
        self._running: list[Place] = []
        self._last = 0.0
        self._own: dict[CodeType, bool] = {}

    def __enter__(self) -> LineClock:
        self._previous = sys.gettrace()
        self._last = time.perf_counter()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Called for each new frame. What it returns is called for its lines."""
        if not self._is_own(frame):
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
        """The time since the last event belongs to the line that was running."""
        if self._running:
            self.seconds[self._running[-1]] += time.perf_counter() - self._last

    def _is_own(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code not in self._own:
            module = str(frame.f_globals.get("__name__"))
            # logitship's own code is no library to `is_installed`. The author's it is only where they say so.
            is_ours = top_level(module) == "logitship" and "logitship" not in self._own_packages
            self._own[code] = _is_own(module, self._own_packages) and not is_ours
        return self._own[code]


def measure_lines(
    cls: type, rehearsal: DryRun, recordings: Sequence[Recording], logits: torch.Tensor
) -> list[SlowLine]:
    """The slowest lines, the slowest first; none if a call fails.

    Tracing tells their shares. What a call takes is measured without it.

    Args:
        cls: the author's own, which says where its lines stand: code that travelled has only the files' names.
        logits: float32 [rows, vocab].
    """
    untraced = own_seconds(rehearsal, recordings, logits)
    if untraced is None:
        return []
    members = rehearsal.members([recordings[row % len(recordings)] for row in range(len(logits))])
    clock = LineClock(own_packages(cls))
    began = time.perf_counter()
    try:
        for call in range(WARM_UP + _MOST_CALLS):
            given = logits.clone()
            if call < WARM_UP:
                output = rehearsal.call(members, given)
            else:
                with one_thread(), clock:
                    output = rehearsal.call(members, given)
            take_tokens(members, output)
            if call >= WARM_UP and time.perf_counter() - began > SECONDS:
                break
    except BaseException:  # noqa: BLE001  # the author's code may raise anything; the sandbox said what is wrong
        return []
    return _slowest(clock.seconds, untraced / len(logits) * 1e6, _files_of(cls))


def _files_of(cls: type) -> dict[str, str]:
    """The files that the class and the functions that it uses come from: their names, to their paths."""
    files: dict[str, str] = {}
    own = own_packages(cls)
    waiting = [function for base in cls.__mro__ if _is_own(base.__module__, own) for function in functions_of(base)]
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ not in seen:
            seen.add(function.__code__)
            files.setdefault(PurePath(function.__code__.co_filename).name, function.__code__.co_filename)
            used = [function.__globals__.get(name) for name in global_names(function.__code__)]
            waiting += [inner for value in used for inner in functions_in(value) if _is_own(inner.__module__, own)]
    return files


def _is_own(module: str, own_packages: Collection[str]) -> bool:
    return top_level(module) in own_packages or not is_installed(module)


def _slowest(seconds: dict[Place, float], microseconds: float, files: dict[str, str]) -> list[SlowLine]:
    """The slowest lines.

    Args:
        microseconds: that all lines take together, for a row.
    """
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])[:_MOST_LINES]
    lines = []
    for (name, line), spent in ordered:
        path, share = files.get(name, name), spent / total
        if share >= _LEAST_SHARE:
            text = linecache.getline(path, line).strip()
            lines.append(SlowLine(path, line, text, round(share, 4), round(share * microseconds, 2)))
    return lines
