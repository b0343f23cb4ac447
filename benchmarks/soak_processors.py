"""Classes that the soak test ships. The effect of each on the logits is known in advance."""

from __future__ import annotations

from typing import Any

import torch

from logitship import CustomLogitProcessor
from logitship.client.serialization.processor_string import SourceProcessor, to_text

FIRST_TOKEN = 1000
"""Tokens from here on are words and parts of them in the default model's vocabulary."""

_HEAD = """
import os
from logitship import CustomLogitProcessor

class {name}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
"""

_FORCE = """
        logits.fill_(-float("inf"))
        logits[:, {token}] = 0.0
        return logits
"""

_COUNT = """
        for row, params in enumerate(custom_param_list):
            state = params["__req__"].state
            sampled = state.get("sampled", 0)
            if sampled == params.get("fail_at"):
                raise ValueError("as requested")
            state["sampled"] = sampled + 1
            logits[row] = -float("inf")
            logits[row, params["first"] + sampled] = 0.0
        return logits
"""

_FAULT = """
        if all(len(params["__req__"].output_ids) < {steps} for params in custom_param_list):
            return logits
        {fault}
        return logits
"""

FAULTS: dict[str, tuple[str, frozenset[str]]] = {
    "raises": ("raise ValueError('as requested')", frozenset({"exception"})),
    "leaves NaN": ("logits[:, 0] = float('nan')", frozenset({"non_finite"})),
    "another shape": ("return logits[:, :-1]", frozenset({"bad_result"})),
    "no tensor": ("return None", frozenset({"bad_result"})),
    "exits": ("os._exit(3)", frozenset({"crash", "load"})),
    "loops": ("while True: pass", frozenset({"deadline", "crash", "load"})),
    "takes all memory": (
        "pieces = [bytes([1]) * (1 << 24) for _ in range(1 << 10)]",
        frozenset({"exception", "crash", "deadline", "load"}),
    ),
}
"""Faulty classes, each with the kinds of fault that are expected. When a class ends its process, another request that
uses it may report that first, with a kind of its own."""


def forced_token(number: int) -> int:
    """Return the token that `forcing` and `ForcingClass` of this number force."""
    return FIRST_TOKEN + number * 7919 % 40_000


def forcing(number: int) -> str:
    """Return a processor string that forces one token; a different class for each number."""
    name = f"Force{number}"
    return to_text(SourceProcessor(_HEAD.format(name=name) + _FORCE.format(token=forced_token(number)), name))


def forcing_class(number: int) -> type[CustomLogitProcessor]:
    """Return the same as a class, which is sent as a pickle."""
    token = forced_token(number)

    class Forcing(CustomLogitProcessor):
        """Forces one token."""

        def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
            forced = torch.full_like(logits, -torch.inf)
            forced[:, token] = 0.0
            return forced

    return Forcing


def counting(number: int = 0) -> str:
    """Return a processor string that forces `params["first"]` and the tokens after it, and raises at `fail_at`."""
    name = f"Count{number}"
    return to_text(SourceProcessor(_HEAD.format(name=name) + _COUNT, name))


def failing(what: str, steps: int, number: int) -> str:
    """Return a processor string with one of `FAULTS` after `steps` tokens; a different class for each number."""
    name = f"Fail{number}"
    return to_text(SourceProcessor(_HEAD.format(name=name) + _FAULT.format(steps=steps, fault=FAULTS[what][0]), name))


def unloadable(number: int) -> str:
    """Return a processor string whose class cannot be loaded."""
    return to_text(SourceProcessor(f"raise RuntimeError('never loads {number}')", "Missing"))
