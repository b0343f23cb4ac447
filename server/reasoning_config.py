"""`--reasoning-config`: the strings that start and end the model's reasoning, with vLLM's keys."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEYS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")

_THINK = ("<think>", "</think>")
_PARSERS = {
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_r1": _THINK,
    "ernie45": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK,
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "olmo3": _THINK,
    "qwen3": _THINK,
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "step3": _THINK,
}
"""Start and end strings by the names of vLLM's reasoning parsers."""


@dataclass(frozen=True)
class ReasoningStrings:
    """Strings that start and end the reasoning.

    Attributes:
        parser: the reasoning parser that implies them; "" if none was given.
        start: begins the reasoning.
        end: is forced when the budget is spent.
        natural_end: what the model writes on its own.
    """

    parser: str
    start: str
    end: str
    natural_end: str


def read_reasoning_config(given: str | Mapping[str, Any]) -> ReasoningStrings:
    """Parse the setting.

    Args:
        given: a dict, or its JSON text, with `reasoning_start_str` and `reasoning_end_str`. `reasoning_parser` implies
            both; an explicit `reasoning_end_str` is then forced instead of the natural end.

    Raises:
        ValueError: the setting is malformed.
    """
    values = _read_object(given)
    parser = values.get("reasoning_parser", "")
    if parser and parser not in _PARSERS:
        raise ValueError(
            f"reasoning_config: reasoning_parser {parser[:80]!r} is not one of {', '.join(_PARSERS)}: give "
            "reasoning_start_str and reasoning_end_str instead"
        )
    known_start, known_end = _PARSERS.get(parser, ("", ""))
    start = values.get("reasoning_start_str") or known_start
    end = values.get("reasoning_end_str") or known_end
    for name, text in (("reasoning_start_str", start), ("reasoning_end_str", end)):
        if not text:
            raise ValueError(f"reasoning_config: {name} is missing: give it, or the reasoning_parser that implies it")
    return ReasoningStrings(parser, start, end, known_end or end)


def _read_object(given: str | Mapping[str, Any]) -> Mapping[str, str]:
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"reasoning_config: is not JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"reasoning_config: expected an object with {' and '.join(_KEYS[1:])}")
    for name, value in values.items():
        if name not in _KEYS:
            close = difflib.get_close_matches(str(name), _KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(_KEYS)}"
            raise ValueError(f"reasoning_config: unknown key {str(name)[:80]!r}: {hint}")
        if not isinstance(value, str):
            raise ValueError(f"reasoning_config: {name} must be a string")
    return values
