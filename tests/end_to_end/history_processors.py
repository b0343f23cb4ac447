"""Processors that check, or show, which calls and histories they saw: for the tests inside other servers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from logitship import CustomLogitProcessor

FIRST = 1000
"""First of the tokens that are forced."""
TABLE = torch.arange(20_000)
"""Large enough to be uploaded as an artifact."""


class ForcesFromTable(CustomLogitProcessor):
    """Forces the tokens from FIRST on, out of an artifact."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            logits[row] = -float("inf")
            logits[row, TABLE[FIRST + len(params["__req__"].output_ids)]] = 0.0
        return logits


class CountsCalls(CustomLogitProcessor):
    """Forces token `first` + n in the n-th call for a sequence, and checks that its output is the n tokens before."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            calls = request.state.setdefault("calls", 0)
            request.state["calls"] = calls + 1
            expected = [params["first"] + call for call in range(calls)]
            if list(request.output_ids) != expected:
                raise AssertionError(f"call {calls} saw {request.output_ids}")
            logits[row] = -float("inf")
            logits[row, params["first"] + calls] = 0.0
        return logits


class HashesHistory(CustomLogitProcessor):
    """Keeps the model's choice, except for a last token that is a hash of the history and the number of calls."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            calls = request.state["calls"] = request.state.get("calls", 0) + 1
            if len(request.output_ids) == params["last"]:
                logits[row] = -float("inf")
                logits[row, history_token(request.origin_input_ids, request.output_ids, calls)] = 0.0
        return logits


def history_token(prompt: Sequence[int], output: Sequence[int], calls: int) -> int:
    """Return the token that `HashesHistory` forces."""
    return 5000 + zlib.crc32(repr((list(prompt), list(output), calls)).encode()) % 10_000


class OnlyEven(CustomLogitProcessor):
    """Forbids tokens with odd ids."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        logits[:, 1::2] = -torch.inf
        return logits
