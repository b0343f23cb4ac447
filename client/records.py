"""Results of the client's methods: frozen records, the same for all routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import notebook_html

if TYPE_CHECKING:  # it needs NumPy
    from .sampling_record import SamplingRecord

_MAX_ROWS = 12
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
        milliseconds: its share of the time spent in the processor: the time of each call divided by its rows.
        forced_steps: those of the steps that needed no forward pass of their own, because their tokens were forced, or
            guessed from a grammar.
        printed: the last of what it printed in its calls, also those that had rows of other requests of the API key.
    """

    digest: str
    name: str
    steps: int
    milliseconds: float
    forced_steps: int = 0
    printed: str = ""


@dataclass(frozen=True)
class FinishReason:
    """Reason for the end of a continuation.

    The server's counterpart is `logitship.server.requests.messages.FinishReason`.

    Attributes:
        kind: `stop` (EOS token, stop token or stop string), `length`, `abort`, or another value of the server.
        matched: for `stop`: the token id or string that ended it, if the server says.
    """

    kind: str
    matched: int | str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens counted by the server.

    On `/generate` for one continuation; on the OpenAI routes for the whole response.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the server's prefix cache."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability at one position.

    Attributes:
        logprob: natural logarithm; None for the first token of a prompt.
        token_id: token id; None on the OpenAI routes, which only return texts.
        token: its text; None if the server does not send it.
        top: the most likely tokens at this position, most likely first; their `top` is empty.
        requested: the tokens of `token_ids_logprob`, in its order.
    """

    logprob: float | None
    token_id: int | None = None
    token: str | None = None
    top: tuple[TokenLogprob, ...] = ()
    requested: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TraceStage:
    """Log-probabilities of the candidates for one token, at one stage of a step.

    Attributes:
        stage: `model`: output of the model. `request`: after the request's own parameters (biases, penalties, masks, a
            thinking budget) and the server's batch processors, before the request's processors. `processor`: after
            the named processor. `sampling`: the distribution that the token was sampled from, after temperature,
            min-p, top-k and top-p; with temperature 0, the token alone.
        name: name of the processor.
        digest: digest of the processor.
        again: whether this is the second run of a mask, after the other processors.
        logprobs: one per candidate, natural logarithm; None for a token that is forbidden at this stage.
        num_allowed: number of tokens in the vocabulary that are not forbidden at this stage; 1: the token is forced.
    """

    stage: str
    name: str | None = None
    digest: str | None = None
    again: bool = False
    logprobs: tuple[float | None, ...] = ()
    num_allowed: int = 0


@dataclass(frozen=True)
class TraceCandidate:
    """A candidate for a token of the output.

    Attributes:
        text: the token by itself; bytes that are not valid UTF-8 become U+FFFD.
    """

    token_id: int
    text: str


@dataclass(frozen=True)
class TokenTrace:
    """Trace of the sampling of one output token. `print` shows it as a table, and so does a notebook.

    Attributes:
        token: the sampled token.
        candidates: the most likely tokens of each stage, and the sampled one; the model's most likely first.
        stages: the stages in the order in which they ran.
    """

    token: TraceCandidate
    candidates: tuple[TraceCandidate, ...]
    stages: tuple[TraceStage, ...]

    @property
    def edited(self) -> TraceStage:
        """The stage before `sampling`: all processors have run."""
        return next(stage for stage in reversed(self.stages) if stage.stage != "sampling")

    def __str__(self) -> str:
        return _trace_table(self)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return _trace_html(self)


class Trace(tuple[TokenTrace, ...]):
    """Traces of the tokens of an answer. A notebook shows them as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return a table with a row per token for a notebook."""
        return traces_html(self)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished continuation of one prompt.

    Attributes:
        text: the whole text.
        index: position in the response: for a batch of prompts with `n` continuations each, continuation `j` of prompt
            `i` has index `i * n + j`.
        output_ids: its token ids; empty if the server does not send them (the OpenAI routes).
        finish_reason: why it ended.
        usage: token counts.
        logprobs: one per output token, if requested.
        prompt_logprobs: one per prompt token, if requested.
        receipts: one per processor of the request, in the order in which they ran. Empty if the server does not issue
            them (stock SGLang and vLLM do not).
        sampling_record: how the tokens were sampled, for `logitship.replay`, with `return_sampling_mask` and the
            `sampling_mask_format` `packed`.
        trace: one per output token, if requested and supported (stock SGLang does not).
        rid: id of the request.
        raw: the part of the response that this was parsed from.
    """

    text: str
    index: int = 0
    output_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage = Usage()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    receipts: tuple[Receipt, ...] = ()
    sampling_record: SamplingRecord | None = field(default=None, repr=False)
    trace: Trace | None = field(default=None, repr=False)
    rid: str | None = None
    raw: Mapping[str, Any] = field(repr=False)

    def _repr_html_(self) -> str:
        """Return the answer with its receipts and trace for a notebook."""
        reason = "" if self.finish_reason is None else f", ended by {self.finish_reason.kind}"
        status = f"{self.usage.completion_tokens} tokens{reason}"
        return answer_html(self.text, status, self.receipts, self.trace)


@dataclass(frozen=True, kw_only=True)
class GenerationChunk:
    """New part of one continuation since its previous chunk.

    The server's counterpart is `logitship.server.requests.messages.GenerationChunk`.

    Attributes:
        text: the new text.
        cumulative_text: all text of this continuation so far, `text` included.
        index: which continuation, as in `Generation`.
        output_ids: the new token ids; empty if the server does not send them.
        finish_reason: set on the continuation's last chunk, which may have no text. Only a chunk with token counts
            may follow.
        usage: token counts so far, if the server sends them. The OpenAI routes send them once, in a chunk without
            text at the end of the stream.
        logprobs: one per new token, if requested.
        receipts: one per processor, at the end of the continuation.
        sampling_record: that of the new tokens, see `Generation`.
        trace: one per new token, if requested.
        rid: id of the request.
        raw: the event that this was parsed from.
    """

    text: str
    cumulative_text: str
    index: int = 0
    output_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    receipts: tuple[Receipt, ...] = ()
    sampling_record: SamplingRecord | None = field(default=None, repr=False)
    trace: Trace | None = field(default=None, repr=False)
    rid: str | None = None
    raw: Mapping[str, Any] = field(repr=False)

    def _repr_html_(self) -> str:
        """Return the text so far, and what is new, for a notebook."""
        reason = "" if self.finish_reason is None else f", ended by {self.finish_reason.kind}"
        return answer_html(self.cumulative_text, f"new: {self.text!r}{reason}", self.receipts, self.trace)


@dataclass(frozen=True)
class Model:
    """A model that the server serves.

    Attributes:
        id: name of the model in requests.
        max_model_len: maximum length of prompt and output together, in tokens, if the server says.
        raw: the entry in the response.
    """

    id: str
    max_model_len: int | None
    raw: Mapping[str, Any] = field(repr=False)


def answer_html(text: str, status: str, receipts: Sequence[Receipt], trace: Sequence[TokenTrace] | None) -> str:
    """Return an answer as HTML for a notebook."""
    parts = [notebook_html.text(text), notebook_html.small(status)]
    for receipt in receipts:
        steps = f"{receipt.name}: {receipt.steps} steps, {receipt.milliseconds:.1f} ms, {receipt.digest[:19]}…"
        parts.append(notebook_html.small(steps))
        if receipt.printed:
            parts.append(notebook_html.preformatted(receipt.printed))
    if trace:
        parts.append(notebook_html.details(f"Trace of {len(trace)} tokens", traces_html(trace)))
    return "\n".join(parts)


def traces_html(traces: Sequence[TokenTrace]) -> str:
    """Return a table with a row per token: its probability before and after the processors, and the model's choice.

    Tokens that the model would not have chosen first are bold.
    """
    rows, marked = [], []
    for number, trace in enumerate(traces):
        at = _sampled_index(trace)
        wanted = trace.candidates[0]
        cells = [
            f"{number + 1} {trace.token.text!r}",
            _percent(trace.stages[0].logprobs[at]),
            _percent(trace.edited.logprobs[at]),
            f"{trace.edited.num_allowed:,}",
            f"{wanted.text!r} {_percent(trace.stages[0].logprobs[0])}",
        ]
        if wanted.token_id != trace.token.token_id:
            marked.append(number)
        rows.append(cells)
    titles = ["token", "model", "processors", "allowed", "model's first choice"]
    return notebook_html.table(titles, rows, marked)


def _trace_html(trace: TokenTrace) -> str:
    sampled = _sampled_index(trace)
    shown = sorted({*range(len(trace.candidates))[:_MAX_ROWS], sampled})
    rows = [[repr(trace.candidates[i].text), *(_percent(stage.logprobs[i]) for stage in trace.stages)] for i in shown]
    rows.append([_ALLOWED, *(f"{stage.num_allowed:,}" for stage in trace.stages)])
    titles = ["", *(stage.name or stage.stage for stage in trace.stages)]
    return notebook_html.table(titles, rows, [shown.index(sampled)])


def _sampled_index(trace: TokenTrace) -> int:
    return next(i for i, each in enumerate(trace.candidates) if each.token_id == trace.token.token_id)


def _trace_table(trace: TokenTrace) -> str:
    """Return one line per candidate with its probability at each stage, in percent.

    A star marks the sampled token, `-` a forbidden one.
    """
    indices = range(len(trace.candidates))
    sampled = _sampled_index(trace)
    shown = sorted({*indices[:_MAX_ROWS], sampled})
    texts = [repr(trace.candidates[i].text) for i in shown]
    width = max(len(_ALLOWED), *map(len, texts))
    lines = ["  ".join([" " * (width + 2), *(_title(stage) for stage in trace.stages)])]
    for i, text in zip(shown, texts, strict=True):
        numbers = [f"{_percent(stage.logprobs[i]):>{_NAME_WIDTH}}" for stage in trace.stages]
        lines.append("  ".join([f"{'*' if i == sampled else ' '} {text:<{width}}", *numbers]))
    allowed = [f"{stage.num_allowed:>{_NAME_WIDTH},}" for stage in trace.stages]
    lines.append("  ".join([f"  {_ALLOWED:<{width}}", *allowed]))
    return "\n".join(line.rstrip() for line in lines)


def _title(stage: TraceStage) -> str:
    title = stage.name or stage.stage
    return f"{title if len(title) <= _NAME_WIDTH else title[: _NAME_WIDTH - 1] + '…':>{_NAME_WIDTH}}"


def _percent(logprob: float | None) -> str:
    return _FORBIDDEN if logprob is None else f"{math.exp(logprob):.2%}"
