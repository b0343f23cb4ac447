"""Traces as the routes send them, the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitship.client.records import TraceStage
from logitship.sampler.trace import RowTrace
from logitship.server.tokenizer import Tokenizer

from .body import finite


def trace_objects(tokenizer: Tokenizer, traces: Sequence[RowTrace]) -> list[dict[str, Any]]:
    """One object a token. Tokens that are forbidden at a stage have null there.

    Args:
        tokenizer: gives the tokens' texts.
    """
    return [
        {
            **_token(tokenizer, trace.token_id),
            "candidates": [_token(tokenizer, token_id) for token_id in trace.candidates],
            "stages": [_stage(stage) for stage in trace.stages],
        }
        for trace in traces
    ]


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    return {"token_id": token_id, "text": tokenizer.token_text(token_id)}


def _stage(stage: TraceStage) -> dict[str, Any]:
    about: dict[str, Any] = {"stage": stage.stage}
    if stage.digest is not None:
        about |= {"name": stage.name, "digest": stage.digest}
    if stage.again:
        about["again"] = True
    return {**about, "logprobs": [finite(logprob) for logprob in stage.logprobs], "num_allowed": stage.num_allowed}
