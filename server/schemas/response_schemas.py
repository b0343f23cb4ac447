"""What answers of several routes have: errors, receipts, traces, token counts. For the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from .documented import documented

DIGEST = "sha256:d59b82276836541679b9d69859783f73e2d2d78894e7979162f769268c1f2a72"
"""In examples."""


class FaultDetails(TypedDict, total=False):
    """Keys of an error that a processor's fault adds."""

    traceback: str
    digest: str
    name: str
    kind: str


@documented(
    {
        "message": "processor Lipogram raised ZeroDivisionError: division by zero",
        "type": "ProcessorFault",
        "param": "custom_logit_processor",
        "code": None,
        "index": 0,
        "kind": "exception",
        "name": "Lipogram",
        "digest": DIGEST,
        "traceback": 'Traceback (most recent call last):\n  File "lipogram.py", line 9, in __call__\n',
    }
)
class ErrorInfo(TypedDict):
    """What went wrong."""

    message: str
    """One sentence, with the field or the object that it is about."""
    type: str
    """Which kind of error it is."""
    param: str | None
    """Path of the field in the request body."""
    code: str | None
    """OpenAI's code, where it has one."""
    index: NotRequired[int]
    """Of an error that ended a running request: the continuation that it hit first."""
    kind: NotRequired[str]
    """Of a processor's fault: in which way it broke its contract."""
    name: NotRequired[str]
    """Of a processor's fault: the processor's name."""
    digest: NotRequired[str]
    """Of a processor's fault: the processor's identity."""
    traceback: NotRequired[str]
    """Of a processor's fault: the traceback of its own code; empty where there is none."""


@documented(
    {
        "error": {
            "message": "top_kk: unknown field, did you mean top_k?",
            "type": "invalid_request_error",
            "param": "top_kk",
            "code": None,
        }
    }
)
class ErrorResponse(TypedDict):
    """Why a request was refused, or ended."""

    error: ErrorInfo
    """All there is to say of it."""


StageName: TypeAlias = Literal["model", "request", "processor", "sampling"]


@documented({"digest": DIGEST, "name": "Lipogram", "steps": 12, "milliseconds": 0.869})
class ReceiptObject(TypedDict):
    """Proof that a processor was applied."""

    digest: str
    """The processor's identity."""
    name: str
    """Its name."""
    steps: int
    """Number of steps to which it was applied."""
    milliseconds: float
    """Its share of the time: that of each call, divided by the rows of the call."""


@documented({"token_id": 30, "text": "."})
class TraceToken(TypedDict):
    """A token."""

    token_id: int
    """Its number in the vocabulary."""
    text: str
    """Its text."""


@documented(
    {
        "stage": "processor",
        "name": "Lipogram",
        "digest": DIGEST,
        "again": True,
        "logprobs": [-0.105, None],
        "num_allowed": 12345,
    }
)
class TraceStageObject(TypedDict):
    """What the candidates' probabilities were at one stage of the way from the model to the token."""

    stage: StageName
    """`model`: its logits. `request`: after the request's own parameters. `processor`: after one of its processors.
    `sampling`: what the token was drawn from."""
    name: NotRequired[str]
    """Of a processor: its name."""
    digest: NotRequired[str]
    """Of a processor: its identity."""
    again: NotRequired[Literal[True]]
    """Of a processor that is a mask: it ran before the others already."""
    logprobs: list[float | None]
    """Of each candidate, its log-probability at this stage; null: it is forbidden."""
    num_allowed: int
    """How many tokens of the vocabulary are allowed at this stage; 1: this one is forced."""


@documented(
    {
        "token_id": 30,
        "text": ".",
        "candidates": [{"token_id": 30, "text": "."}, {"token_id": 28, "text": ","}],
        "stages": [
            {"stage": "model", "logprobs": [-0.105, -2.303], "num_allowed": 49152},
            {"stage": "request", "logprobs": [-0.105, -2.303], "num_allowed": 49152},
            {
                "stage": "processor",
                "name": "Lipogram",
                "digest": DIGEST,
                "logprobs": [-0.001, None],
                "num_allowed": 12345,
            },
            {"stage": "sampling", "logprobs": [0.0, None], "num_allowed": 1},
        ],
    }
)
class TokenTraceObject(TypedDict):
    """What became of the most likely tokens, from the model to the token that was drawn."""

    token_id: int
    """The token that was drawn."""
    text: str
    """Its text."""
    candidates: list[TraceToken]
    """The most likely tokens of all stages, and the drawn one; the most likely in the model first."""
    stages: list[TraceStageObject]
    """The stages, in their order."""
