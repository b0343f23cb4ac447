"""What the client hands back: frozen records, the same ones whichever route was called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_ROWS = 12
_NAME_WIDTH = 12
_FORBIDDEN = "-"
_ALLOWED = "allowed"


@dataclass(frozen=True)
class Receipt:
    """Proof that a processor was applied.

    Attributes:
        digest: the processor's identity, `sha256:…`.
        name: its class name.
        steps: number of decoding steps to which it was applied.
        milliseconds: its share of the time spent in the processor: a call's time divided by the rows of the call.
    """

    digest: str
    name: str
    steps: int
    milliseconds: float


@dataclass(frozen=True)
class FinishReason:
    """Why a continuation ended.

    Attributes:
        kind: `stop` (end token, stop token or stop string), `length`, `abort`, or the server's own word.
        matched: for `stop`: the token id or the string that ended it, where the server says.
    """

    kind: str
    matched: int | str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens counted by the server.

    On `/generate` they count one continuation; on the OpenAI routes, the whole response.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came out of the server's prefix cache."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability at one position.

    Attributes:
        logprob: natural logarithm; None for the first token of a prompt.
        token_id: None on the OpenAI routes, which give texts.
        token: its text; None where the server sent none.
        top: the most likely tokens of this position, most likely first; their own `top` is empty.
    """

    logprob: float | None
    token_id: int | None = None
    token: str | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TraceStage:
    """What a step had made of the candidates for one token, at one point.

    Attributes:
        stage: `model`: what the model computed. `request`: after the request's own parameters (biases, penalties,
            masks, a thinking budget) and the server's batch processors, before the request's processors. `processor`:
            after the one that is named. `sampling`: what the token was drawn from, after temperature, min-p, top-k and
            top-p; with temperature 0, the token alone.
        name: of the processor.
        digest: of the processor.
        again: it is a mask, which runs once more after the other processors.
        logprobs: one a candidate, natural logarithm; None for a token that is forbidden there.
        num_allowed: how many tokens of the vocabulary are not forbidden there; 1: the token is forced.
    """

    stage: str
    name: str | None = None
    digest: str | None = None
    again: bool = False
    logprobs: tuple[float | None, ...] = ()
    num_allowed: int = 0


@dataclass(frozen=True)
class TraceCandidate:
    """A token that was, or might have been, drawn.

    Attributes:
        text: the token by itself; bytes that are no UTF-8 alone become U+FFFD.
    """

    token_id: int
    text: str


@dataclass(frozen=True)
class TokenTrace:
    """How one token of an output came about. `print` shows it as a table.

    Attributes:
        token: what was drawn.
        candidates: the most likely tokens of each stage, and the one that was drawn; the most likely of the model
            first.
        stages: in the order in which they ran.
    """

    token: TraceCandidate
    candidates: tuple[TraceCandidate, ...]
    stages: tuple[TraceStage, ...]

    def __str__(self) -> str:
        return _trace_table(self)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished continuation of one prompt.

    Attributes:
        text: the whole text.
        index: its place in the server's answer: for a batch of prompts with `n` continuations each, continuation `j` of
            prompt `i` has index `i * n + j`.
        output_ids: its token ids; empty where the server sends none (the OpenAI routes).
        finish_reason: why it ended.
        usage: token counts.
        logprobs: one an output token, if asked for.
        prompt_logprobs: one a prompt token, if asked for.
        receipts: one a processor that the request carried, in the order in which they ran. Empty: the server issues
            none (stock SGLang and vLLM do not).
        trace: one an output token, if asked for. None: it was not, or the server makes none (stock SGLang does not).
        rid: the request's id.
        raw: the part of the server's answer that this was read from.
    """

    text: str
    index: int = 0
    output_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage = Usage()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    receipts: tuple[Receipt, ...] = ()
    trace: tuple[TokenTrace, ...] | None = field(default=None, repr=False)
    rid: str | None = None
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class GenerationChunk:
    """What one continuation gained since its previous chunk.

    Attributes:
        text: the new text.
        cumulative_text: all text of this continuation so far, `text` included.
        index: which continuation, as in `Generation`.
        output_ids: the new token ids; empty where the server sends none.
        finish_reason: set on the continuation's last chunk with text.
        usage: token counts so far, where the server sends them. The OpenAI routes send them once, in a chunk without
            text at the end of the stream.
        logprobs: one a new token, if asked for.
        receipts: one a processor, at the end of the continuation.
        trace: one a new token, if asked for.
        rid: the request's id.
        raw: the event that this was read from.
    """

    text: str
    cumulative_text: str
    index: int = 0
    output_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    receipts: tuple[Receipt, ...] = ()
    trace: tuple[TokenTrace, ...] | None = field(default=None, repr=False)
    rid: str | None = None
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Model:
    """A model that the server serves.

    Attributes:
        id: the name to ask for it by.
        max_model_len: longest prompt and output together, in tokens, where the server says.
        raw: the server's entry.
    """

    id: str
    max_model_len: int | None
    raw: Mapping[str, Any] = field(repr=False)


def _trace_table(trace: TokenTrace) -> str:
    """One line a candidate with its probability at each stage, in percent.

    A star marks the token that was drawn, `-` one that is forbidden.
    """
    places = range(len(trace.candidates))
    drawn = next(place for place in places if trace.candidates[place].token_id == trace.token.token_id)
    shown = sorted({*places[:_MOST_ROWS], drawn})
    texts = [repr(trace.candidates[place].text) for place in shown]
    width = max(len(_ALLOWED), *map(len, texts))
    lines = ["  ".join([" " * (width + 2), *(_title(stage) for stage in trace.stages)])]
    for place, text in zip(shown, texts, strict=True):
        numbers = [f"{_percent(stage.logprobs[place]):>{_NAME_WIDTH}}" for stage in trace.stages]
        lines.append("  ".join([f"{'*' if place == drawn else ' '} {text:<{width}}", *numbers]))
    allowed = [f"{stage.num_allowed:>{_NAME_WIDTH},}" for stage in trace.stages]
    lines.append("  ".join([f"  {_ALLOWED:<{width}}", *allowed]))
    return "\n".join(line.rstrip() for line in lines)


def _title(stage: TraceStage) -> str:
    title = stage.name or stage.stage
    return f"{title if len(title) <= _NAME_WIDTH else title[: _NAME_WIDTH - 1] + '…':>{_NAME_WIDTH}}"


def _percent(logprob: float | None) -> str:
    return _FORBIDDEN if logprob is None else f"{math.exp(logprob):.2%}"
