"""A run of `logitship dev` as text: the answer, the trace, errors with the author's lines."""

from __future__ import annotations

import linecache
import math
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from logitship.client.records import TokenTrace
from logitship.server.offline.outputs import RequestOutput

TraceStyle = Literal["lines", "tables", "off"]

WIDTH = 100
_TOKEN_WIDTH = 20
_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')


def answer_text(output: RequestOutput, style: TraceStyle) -> str:
    """Return the answer, the processor's receipts, and the trace.

    Args:
        output: of a finished request with one continuation.
        style: a line for each token, a table for each token, or no trace.
    """
    (answer,) = output.outputs
    lines = [answer.text, ""]
    for receipt in answer.receipts:
        each = receipt.milliseconds / max(1, receipt.steps)
        forced = f", {receipt.forced_steps} of them forced" if receipt.forced_steps else ""
        lines.append(f"{receipt.name}: {receipt.steps} steps{forced}, {each:.1f} ms each; ended by {_end(output)}")
    if style == "tables":
        for number, trace in enumerate(answer.trace or (), 1):
            lines += ["", f"token {number}", str(trace)]
    elif style == "lines":
        lines += trace_lines(answer.trace or ())
    return "\n".join(lines)


def _end(output: RequestOutput) -> str:
    (answer,) = output.outputs
    if answer.finish_reason == "length":
        return "--max-tokens"
    return "the EOS token" if answer.stop_reason is None else repr(answer.stop_reason)


def trace_lines(traces: Sequence[TokenTrace]) -> list[str]:
    """Return one line per token: its probability before and after the processor, and the model's own choice.

    A star marks tokens whose probability the processor changed.
    """
    if not traces:
        return []
    texts = [_cut(repr(trace.token.text), _TOKEN_WIDTH) for trace in traces]
    width = max(map(len, [*texts, "token"]))
    lines = ["", f"     {'token':<{width}}    model  processor     allowed"]
    for number, (text, trace) in enumerate(zip(texts, traces, strict=True), 1):
        before, after = trace.stages[0], trace.edited
        at = next(i for i, each in enumerate(trace.candidates) if each.token_id == trace.token.token_id)
        changed = before.logprobs != after.logprobs
        line = f"{'*' if changed else ' '}{number:>3} {text:<{width}} {_percent(before.logprobs[at])} "
        line += f"  {_percent(after.logprobs[at])}{after.num_allowed:>12,}"
        if trace.candidates[0].token_id != trace.token.token_id:
            wanted = _cut(repr(trace.candidates[0].text), _TOKEN_WIDTH)
            line += f"   instead of {wanted} ({_percent(before.logprobs[0]).strip()})"
        lines.append(line)
    return lines


def _percent(logprob: float | None) -> str:
    return f"{'-' if logprob is None else f'{math.exp(logprob):.2%}':>8}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def with_source_lines(text: str, paths: Sequence[Path]) -> str:
    """Show the author's paths in a traceback, and source lines where it has none.

    Args:
        text: the traceback.
        paths: the author's files, the main one first. Of several with the same name, the first is shown.
    """
    known = {path.name: path for path in reversed(paths)}
    lines: list[str] = []
    given = text.splitlines()
    for line, following in zip(given, [*given[1:], ""], strict=True):
        found = _FRAME.match(line)
        path = known.get(found[1]) if found else None
        if found is None or path is None:
            lines.append(line)
            continue
        lines.append(line.replace(f'"{found[1]}"', f'"{shown_path(path)}"', 1))
        linecache.checkcache(str(path))
        source = linecache.getline(str(path), int(found[2])).strip()
        if source and not following.startswith("    "):
            lines.append(f"    {source}")
    return "\n".join(lines)


def import_traceback(error: BaseException, paths: Sequence[Path]) -> str:
    """Return the traceback of an import from where it enters the author's files."""
    linecache.checkcache()
    formatted = traceback.TracebackException.from_exception(error, limit=None)
    own = {str(path) for path in paths}
    for each in _chain(formatted):
        first = next((i for i, frame in enumerate(each.stack) if frame.filename in own), len(each.stack))
        each.stack = traceback.StackSummary.from_list(each.stack[first:])
    return "".join(formatted.format()).rstrip()


def _chain(first: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    following: traceback.TracebackException | None = first
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def shown_path(path: Path) -> str:
    """Return the path relative to the current folder if it is in it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
