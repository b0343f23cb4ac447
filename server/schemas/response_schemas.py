"""Objects in the responses of several routes: errors, receipts, sampling masks, traces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from logitship.client.records import Receipt

from .documented import documented, example_of

DIGEST = "sha256:d59b82276836541679b9d69859783f73e2d2d78894e7979162f769268c1f2a72"
"""Digest in the examples."""


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
        "param": None,
        "code": None,
        "index": 0,
        "kind": "exception",
        "name": "Lipogram",
        "digest": DIGEST,
        "traceback": 'Traceback (most recent call last):\n  File "lipogram.py", line 9, in __call__\n',
    }
)
class ErrorInfo(TypedDict):
    """An error."""

    message: str
    """Human-readable message that names the field or object."""
    type: str
    """Error type."""
    param: str | None
    """Path of the field in the request body; null for a fault: `digest` identifies the processor."""
    code: str | None
    """OpenAI's error code, if it has one."""
    index: NotRequired[int]
    """Only if an error ended a running request: index of the first continuation that failed."""
    kind: NotRequired[str]
    """Only for a processor's fault: how the processor violated its contract."""
    name: NotRequired[str]
    """Only for a processor's fault: the processor's name."""
    digest: NotRequired[str]
    """Only for a processor's fault: the processor's digest."""
    traceback: NotRequired[str]
    """Only for a processor's fault: the traceback of its own code; may be empty."""


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
    """The response to a request that was refused or failed."""

    error: ErrorInfo
    """The error."""


StageName: TypeAlias = Literal["model", "request", "processor", "sampling"]


@documented(
    {
        "digest": DIGEST,
        "name": "Lipogram",
        "steps": 12,
        "milliseconds": 0.869,
        "forced_steps": 0,
        "printed": "3,120 tokens are forbidden\n",
    }
)
class ReceiptObject(TypedDict):
    """Proof that a processor was applied."""

    digest: str
    """The processor's digest."""
    name: str
    """The processor's name."""
    steps: int
    """Number of steps in which it was applied."""
    milliseconds: float
    """Time spent in the processor: each call's time, divided by the rows of the call."""
    forced_steps: int
    """Number of these steps that needed no forward pass of their own, because their tokens were forced."""
    printed: NotRequired[str]
    """The last of what it printed; left out if it printed nothing."""


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


@documented({"token_id": 30, "text": "."})
class TraceToken(TypedDict):
    """A token."""

    token_id: int
    """Token id."""
    text: str
    """The token's text."""


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
    """The candidates' log-probabilities at one stage of a step."""

    stage: StageName
    """`model`: the model's logits. `request`: after the request's sampling parameters. `processor`: after one of its
    processors. `sampling`: the distribution that the token was sampled from."""
    name: NotRequired[str]
    """Only for a processor: its name."""
    digest: NotRequired[str]
    """Only for a processor: its digest."""
    again: NotRequired[Literal[True]]
    """Only for a mask, which runs before and after the other processors: this is its second run."""
    logprobs: list[float | None]
    """Log-probability of each candidate at this stage; null: forbidden."""
    num_allowed: int
    """Number of tokens allowed at this stage; 1: the token is forced."""


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
    """Changes of the probabilities from the model's logits to the sampled token."""

    token_id: int
    """The sampled token."""
    text: str
    """The token's text."""
    candidates: list[TraceToken]
    """The most likely tokens of all stages and the sampled token, sorted by the model's probability."""
    stages: list[TraceStageObject]
    """The stages, in order."""


@documented({"version": "0.1.0"})
class VersionResponse(TypedDict):
    """The version."""

    version: str
    """logitship's version."""


@documented({"server_load": 3})
class LoadResponse(TypedDict):
    """The load, as in vLLM."""

    server_load: int
    """Sequences that run or wait."""


@documented(
    {"positions": "AQAAAA==", "kinds": "AA==", "lengths": "AQA=", "tokens": "ghs=", "values": "AAAgQA=="},
)
class SamplingEditsObject(TypedDict):
    """Edits of the model's logits before the temperature, in order: arrays in base64, little-endian."""

    positions: str
    """Index of the token that each edit belongs to, ascending: 4 bytes each."""
    kinds: str
    """A byte each. 0: add. 1: multiply. 2: replace. 3: divide positive logits, multiply the others."""
    lengths: str
    """Number of tokens that each edits, in as many bytes as a token id; 0: all."""
    tokens: NotRequired[str]
    """These tokens, one edit after the other."""
    values: str
    """float32: of kinds 0 and 2 one for each token, if they name tokens; of others one."""


@documented(
    {
        "version": 1,
        "vocab_size": 49152,
        "temperature": 0.7,
        "start": 0,
        "token_ids": "ghvw/A==",
        "logprobs": "zcxMvQAAgL8=",
        "forms": "AAE=",
        "lengths": "AgABAA==",
        "kept": "ghv9AA==",
        "removed": "HgA=",
        "bits": "AAAA",
        "edits": example_of(SamplingEditsObject),
    }
)
class SamplingRecordObject(TypedDict):
    """Record of the sampling of tokens, for `logitship.replay`. Arrays are in base64, or left out if empty."""

    version: int
    """Version of the layout."""
    vocab_size: int
    """Number of tokens of the vocabulary."""
    temperature: float
    """The number that the logits were divided by; 1 for a request with temperature 0."""
    start: int
    """Number of tokens of the output before these."""
    token_ids: NotRequired[str]
    """The tokens: little-endian, 2 bytes each if the vocabulary has fewer than 65,536 tokens, else 4."""
    logprobs: NotRequired[str]
    """The log-probability of each under the distribution that it was sampled from: float32."""
    forms: NotRequired[str]
    """The form of each mask, a byte. 0: the tokens that could be sampled. 1: the others. 2: a bit per token."""
    lengths: NotRequired[str]
    """Number of token ids of each mask, in as many bytes as a token id; 0 for form 2."""
    kept: NotRequired[str]
    """The token ids of the masks of form 0, one mask after the other, each with the most likely token first."""
    removed: NotRequired[str]
    """The same for form 1, ascending."""
    edits: NotRequired[SamplingEditsObject]
    """With `return_sampling_edits`, if there are any: the edits."""
    bits: NotRequired[str]
    """The masks of form 2: set bits could be sampled, and the lowest bit of a byte is the first token."""


@documented(
    {
        "sampling_mask": [[7042, 253]],
        "sampling_logprobs": [-0.05],
        "sampling_record": example_of(SamplingRecordObject),
    }
)
class SamplingMaskFields(TypedDict):
    """Sampling masks of the output's tokens, or of the new tokens of a stream event."""

    sampling_mask: NotRequired[list[list[int]]]
    """With `return_sampling_mask`: for each token those that could be sampled, the most likely first (vLLM's field)."""
    sampling_logprobs: NotRequired[list[float] | list[list[float]]]
    """With `return_sampling_mask`: the log-probability of each token under the distribution that it was sampled from,
    or with `sampling_logprobs_mode` `support` those of all tokens of its mask."""
    sampling_record: NotRequired[SamplingRecordObject]
    """With `sampling_mask_format` `packed`: the same, in its place."""
