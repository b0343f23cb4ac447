"""A token's trace as a table for people."""

from __future__ import annotations

import math

from .records import TokenTrace, TraceStage

_MOST_ROWS = 12
_NAME_WIDTH = 12
_FORBIDDEN = "-"
_ALLOWED = "allowed"


def trace_table(trace: TokenTrace) -> str:
    """One line a candidate with its probability at each stage, in percent.

    A star marks the token that was drawn, `-` one that is forbidden.
    """
    places = range(len(trace.candidates))
    drawn = next(place for place in places if trace.candidates[place].token_id == trace.token.token_id)
    shown = sorted({*places[:_MOST_ROWS], drawn})
    texts = [repr(trace.candidates[place].text) for place in shown]
    width = max(len(_ALLOWED), *map(len, texts))
    lines = ["  ".join([" " * (width + 2), *(_title(stage) for stage in trace.stages)])]
    for place, text in zip(shown, texts, strict=True):
        numbers = [f"{_percent(stage.logprobs[place]):>{_NAME_WIDTH}}" for stage in trace.stages]
        lines.append("  ".join([f"{'*' if place == drawn else ' '} {text:<{width}}", *numbers]))
    allowed = [f"{stage.num_allowed:>{_NAME_WIDTH},}" for stage in trace.stages]
    lines.append("  ".join([f"  {_ALLOWED:<{width}}", *allowed]))
    return "\n".join(line.rstrip() for line in lines)


def _title(stage: TraceStage) -> str:
    title = stage.name or stage.stage
    return f"{title if len(title) <= _NAME_WIDTH else title[: _NAME_WIDTH - 1] + '…':>{_NAME_WIDTH}}"


def _percent(logprob: float | None) -> str:
    return _FORBIDDEN if logprob is None else f"{math.exp(logprob):.2%}"
