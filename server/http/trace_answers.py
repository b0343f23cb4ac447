"""Traces as the routes send them, the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict, cast

from logitship.client.records import TraceStage
from logitship.sampler.trace import RowTrace
from logitship.server.schemas.answer_schemas import StageName, TokenTrace, TraceStageAnswer, TraceToken
from logitship.server.tokenizer import Tokenizer

from .body import finite


class _StageProcessor(TypedDict, total=False):
    """Keys of a stage that is a processor."""

    name: str
    digest: str
    again: Literal[True]


def trace_objects(tokenizer: Tokenizer, traces: Sequence[RowTrace]) -> list[TokenTrace]:
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


def _token(tokenizer: Tokenizer, token_id: int) -> TraceToken:
    return {"token_id": token_id, "text": tokenizer.token_text(token_id)}


def _stage(stage: TraceStage) -> TraceStageAnswer:
    about: _StageProcessor = {}
    if stage.digest is not None and stage.name is not None:
        about = {"name": stage.name, "digest": stage.digest}
    if stage.again:
        about["again"] = True
    return {
        "stage": cast("StageName", stage.stage),
        **about,
        "logprobs": [finite(logprob) for logprob in stage.logprobs],
        "num_allowed": stage.num_allowed,
    }
