"""JSON responses, with the receipts and traces that several routes return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict, cast, overload

import orjson
from fastapi import Response

from logitship.client.records import Receipt, TraceStage
from logitship.sampler.trace import RowTrace
from logitship.server.schemas.response_schemas import (
    ReceiptObject,
    StageName,
    TokenTraceObject,
    TraceStageObject,
    TraceToken,
)
from logitship.server.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent. OpenAI's and vLLM's value."""


@overload
def finite(logprob: float) -> float: ...


@overload
def finite(logprob: float | None) -> float | None: ...


def finite(logprob: float | None) -> float | None:
    """Replace minus infinity by `LOWEST_LOGPROB`; None stays None."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


class JSONResponse(Response):
    """JSON response, encoded with orjson."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the body."""
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def receipt_objects(receipts: Iterable[Receipt]) -> list[ReceiptObject]:
    """Build one object per receipt."""
    return [_receipt_object(receipt) for receipt in receipts]


def _receipt_object(receipt: Receipt) -> ReceiptObject:
    built: ReceiptObject = {
        "digest": receipt.digest,
        "name": receipt.name,
        "steps": receipt.steps,
        "milliseconds": receipt.milliseconds,
        "forced_steps": receipt.forced_steps,
    }
    if receipt.printed:
        built["printed"] = receipt.printed
    return built


def trace_objects(tokenizer: Tokenizer, traces: Sequence[RowTrace]) -> list[TokenTraceObject]:
    """Build one object per token. The log-probability of a token that a stage forbids is null.

    Args:
        tokenizer: gives the tokens' texts.
        traces: one per token.
    """
    return [
        {
            **_token(tokenizer, trace.token_id),
            "candidates": [_token(tokenizer, token_id) for token_id in trace.candidates],
            "stages": [_stage(stage) for stage in trace.stages],
        }
        for trace in traces
    ]


class _StageProcessor(TypedDict, total=False):
    """Keys of a stage that is a processor."""

    name: str
    digest: str
    again: Literal[True]


def _token(tokenizer: Tokenizer, token_id: int) -> TraceToken:
    return {"token_id": token_id, "text": tokenizer.token_text(token_id)}


def _stage(stage: TraceStage) -> TraceStageObject:
    processor: _StageProcessor = {}
    if stage.digest is not None and stage.name is not None:
        processor = {"name": stage.name, "digest": stage.digest}
    if stage.again:
        processor["again"] = True
    return {
        "stage": cast("StageName", stage.stage),
        **processor,
        "logprobs": [finite(logprob) for logprob in stage.logprobs],
        "num_allowed": stage.num_allowed,
    }
