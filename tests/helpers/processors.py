"""Shipped processors as source text."""

from __future__ import annotations

from textwrap import dedent, indent

from logitship.client.serialization.processor_string import SourceProcessor

HEADER = """
import torch
from logitship import CustomLogitProcessor

class {name}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
"""
EACH_ROW = """
for row, params in zip(logits, custom_param_list):
    req = params["__req__"]
{body}
return logits
"""


def shipped(name: str, body: str) -> SourceProcessor:
    """Return a class whose `__call__(self, logits, custom_param_list)` has this body."""
    return SourceProcessor(HEADER.format(name=name) + indent(dedent(body).strip(), " " * 8) + "\n", name)


def shipped_by_row(name: str, body: str) -> SourceProcessor:
    """Return a class that executes this body for each `row` of logits, with its `params` and their request `req`."""
    return shipped(name, EACH_ROW.format(body=indent(dedent(body).strip(), " " * 4)))


BOOST = shipped_by_row("Boost", 'row[params["token_id"]] += params.get("by", 1000.0)')
BAN = shipped_by_row("Ban", 'row[params["token_ids"]] = -torch.inf')
COUNTDOWN = shipped_by_row(
    "Countdown",
    """
    # Force the number of tokens before this one, plus `plus`; fail if the history is not exact.
    position = len(req.origin_input_ids) + len(req.output_ids)
    assert req.state.setdefault("next", position) == position
    req.state["next"] = position + 1
    row[:] = -torch.inf
    row[(position + params.get("plus", 0)) % req.vocab_size] = 0.0
    """,
)
CHECKS_HISTORY = shipped_by_row(
    "ChecksHistory",
    """
    # The n-th call forces token first + n, and fails unless its history is the tokens it forced so far. The logits of
    # the other tokens become `others` - n.
    calls = req.state.setdefault("calls", 0)
    req.state["calls"] = calls + 1
    expected = [params["first"] + call for call in range(calls)]
    if list(req.output_ids) != expected or req.origin_input_ids != [7] * params["prompt"]:
        raise AssertionError(f"call {calls} saw {req.output_ids}")
    if calls == params.get("fails_at"):
        raise RuntimeError("requested")
    row[:] = params.get("others", -torch.inf) - calls
    row[params["first"] + calls] = 0.0
    """,
)
