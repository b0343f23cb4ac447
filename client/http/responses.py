"""Parsing of responses into records: SGLang's format, OpenAI's, and the additions of vLLM and logitship."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from logitship.client.errors import LogitshipError, TransportError
from logitship.client.records import (
    FinishReason,
    Generation,
    Model,
    Receipt,
    TokenLogprob,
    TokenTrace,
    Trace,
    TraceCandidate,
    TraceStage,
    Usage,
)
from logitship.client.serialization.processor_string import RegisteredProcessor

from .error_responses import ReportedError, parse_error_body

if TYPE_CHECKING:
    from logitship.client.sampling_record import SamplingRecord

T = TypeVar("T")


def read_response(content: bytes, parse: Callable[[Any], T]) -> T:
    """Decode a response and parse it.

    Raises:
        TransportError: the format is wrong: this is not an LLM server, or not a compatible one.
    """
    shown = content[:200].decode(errors="replace")
    try:
        data = orjson.loads(content)
    except orjson.JSONDecodeError:
        raise TransportError(f"the server's response is not JSON: {shown!r}") from None
    with malformed_as_transport_error(shown):
        return parse(data)


@contextmanager
def malformed_as_transport_error(shown: str) -> Iterator[None]:
    """Turn the errors of the parsers, which do not check the format, into a `TransportError`."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TransportError(f"the server's response is malformed ({error!r}): {shown!r}") from error


def parse_generate(data: Any, *, many: bool) -> Generation | list[Generation]:
    """Parse the response of `/generate`: one continuation, or a list of them if `many`.

    Raises:
        GenerationError: one of the continuations was ended by an error; `partial` is the whole response.
    """
    entries = data if isinstance(data, list) else [data]
    generations = [_sglang_generation(entry, index) for index, entry in enumerate(entries)]
    result = generations if many else generations[0]
    _raise_first((finish_error(entry["meta_info"]) for entry in entries), result)
    return result


def parse_openai(data: Any, *, many: bool, fault_token: int | None = None) -> Generation | list[Generation]:
    """Parse the response of `/v1/completions` or `/v1/chat/completions`: one continuation per choice, in index order.

    Args:
        data: the decoded body.
        many: whether to return a list.
        fault_token: see `HttpRequest`.

    Raises:
        GenerationError: one of the continuations was ended by an error; `partial` is the whole response.
    """
    choices = sorted(data["choices"], key=lambda choice: int(choice.get("index", 0)))
    generations = [_openai_generation(data, choice) for choice in choices]
    result = generations if many else generations[0]
    _raise_first((choice_error(choice, fault_token) for choice in choices), result)
    return result


def parse_models(data: Any) -> list[Model]:
    """Parse the response of `/v1/models`."""
    return [Model(entry["id"], entry.get("max_model_len"), entry) for entry in data["data"]]


def parse_registered(data: Any) -> RegisteredProcessor:
    """Parse the response of `POST /v1/processors`."""
    return RegisteredProcessor(data["digest"], data.get("id"))


def parse_error(status_code: int, content: bytes) -> LogitshipError:
    """Return the exception for a response with an error status."""
    try:
        body: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = content.decode(errors="replace")
    return (parse_error_body(body) or ReportedError(f"the server answered {body!r}")).as_status_error(status_code, body)


def finish_error(meta: Mapping[str, Any]) -> ReportedError | None:
    """Return the error that ended an SGLang continuation; None if it finished normally."""
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return None
    return ReportedError(
        reason.get("message") or "the request was cancelled",
        type=reason.get("err_type") or "AbortError",
        traceback=reason.get("traceback") or "",
    ).with_parts()


def choice_error(choice: Mapping[str, Any], fault_token: int | None = None) -> ReportedError | None:
    """Return the error that ended a choice of the OpenAI routes; None if it finished normally.

    The routes only report `abort`; logitship's vLLM plugin only reports `fault_token`.
    """
    if fault_token is not None and choice.get("stop_reason") == fault_token:
        return ReportedError(
            "a processor of the request failed, and logitship's plugin for vLLM ended it: the server's log has the "
            "reason",
            type="ProcessorFault",
        )
    if choice.get("finish_reason") != "abort":
        return None
    return parse_error_body(choice) or ReportedError("the request was cancelled", type="AbortError")


def parse_finish_reason(reason: Any, matched: Any = None) -> FinishReason | None:
    """Parse SGLang's dict or OpenAI's string."""
    if isinstance(reason, dict):
        return FinishReason(reason["type"], reason.get("matched"))
    return FinishReason(reason, matched) if isinstance(reason, str) else None


def parse_receipts(entries: Sequence[Mapping[str, Any]] | None) -> tuple[Receipt, ...]:
    """Parse the receipts of a response; empty if the server issues none."""
    return tuple(
        Receipt(
            entry["digest"],
            entry["name"],
            entry["steps"],
            entry["milliseconds"],
            entry.get("forced_steps", 0),
            entry.get("printed", ""),
        )
        for entry in entries or ()
    )


def parse_sampling_record(data: Mapping[str, Any]) -> SamplingRecord | None:
    """Parse the packed sampling masks in `meta_info` or in a choice; None if there are none."""
    record = data.get("sampling_record")
    if record is None:
        return None
    from logitship.client.sampling_record import SamplingRecord  # it needs NumPy, other answers do not

    return SamplingRecord.from_json(record)


def parse_trace(entries: Sequence[Mapping[str, Any]] | None) -> Trace | None:
    """Parse the traces of a response; None if there are none."""
    return None if entries is None else Trace(map(_token_trace, entries))


def _token_trace(entry: Mapping[str, Any]) -> TokenTrace:
    return TokenTrace(
        TraceCandidate(entry["token_id"], entry["text"]),
        tuple(TraceCandidate(candidate["token_id"], candidate["text"]) for candidate in entry["candidates"]),
        tuple(
            TraceStage(
                stage["stage"],
                stage.get("name"),
                stage.get("digest"),
                stage.get("again", False),
                tuple(stage["logprobs"]),
                stage["num_allowed"],
            )
            for stage in entry["stages"]
        ),
    )


def openai_receipts(data: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[Receipt, ...]:
    """Parse the receipts of a choice."""
    return parse_receipts(choice.get("receipts") or data.get("receipts"))


def sglang_usage(meta: Mapping[str, Any]) -> Usage:
    """Parse the token counts in `meta_info`."""
    return Usage(meta.get("prompt_tokens") or 0, meta.get("completion_tokens") or 0, meta.get("cached_tokens") or 0)


def openai_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    """Parse the token counts in `usage`."""
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, details.get("cached_tokens") or 0
    )


def sglang_logprobs(meta: Mapping[str, Any], side: str) -> tuple[TokenLogprob, ...] | None:
    """Parse the log-probabilities in `meta_info`; None if none were requested.

    SGLang writes a position as `[logprob, token id, text or null]`, and its most likely tokens as a list of the same.

    Args:
        meta: `meta_info` of the response.
        side: `input` (the prompt) or `output`.
    """
    entries = meta.get(f"{side}_token_logprobs")
    if entries is None:
        return None
    tops, named = (
        [tuple(TokenLogprob(*each) for each in others or ()) for others in meta.get(name) or [None] * len(entries)]
        for name in (f"{side}_top_logprobs", f"{side}_token_ids_logprobs")
    )
    return tuple(
        TokenLogprob(logprob, token_id, token, top, requested)
        for (logprob, token_id, token), top, requested in zip(entries, tops, named, strict=True)
    )


def openai_logprobs(logprobs: Mapping[str, Any] | None) -> tuple[TokenLogprob, ...] | None:
    """Parse a choice's log-probabilities in the format of chat (`content`) or completions (`token_logprobs`)."""
    if logprobs is None:
        return None
    if logprobs.get("content") is not None:
        return tuple(
            TokenLogprob(entry["logprob"], token=entry["token"], top=_chat_top(entry.get("top_logprobs")))
            for entry in logprobs["content"]
        )
    tokens = logprobs.get("tokens") or ()
    tops: Sequence[Any] = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(logprob, token=token, top=_completions_top(top))
        for token, logprob, top in zip(tokens, logprobs.get("token_logprobs") or (), tops, strict=True)
    )


def _chat_top(entries: Sequence[Mapping[str, Any]] | None) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(entry["logprob"], token=entry["token"]) for entry in entries or ())


def _completions_top(entries: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    ordered = sorted((entries or {}).items(), key=lambda entry: -entry[1])
    return tuple(TokenLogprob(logprob, token=token) for token, logprob in ordered)


def _sglang_generation(data: Mapping[str, Any], index: int) -> Generation:
    meta = data["meta_info"]
    return Generation(
        text=data.get("text", ""),
        index=index,
        output_ids=tuple(data.get("output_ids") or ()),
        finish_reason=parse_finish_reason(meta.get("finish_reason")),
        usage=sglang_usage(meta),
        logprobs=sglang_logprobs(meta, "output"),
        prompt_logprobs=sglang_logprobs(meta, "input"),
        receipts=parse_receipts(meta.get("receipts")),
        sampling_record=parse_sampling_record(meta),
        trace=parse_trace(meta.get("trace")),
        rid=meta.get("id"),
        raw=data,
    )


def _openai_generation(data: Mapping[str, Any], choice: Mapping[str, Any]) -> Generation:
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return Generation(
        text=text or "",
        index=choice.get("index", 0),
        output_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=parse_finish_reason(choice.get("finish_reason"), matched_stop(choice)),
        usage=openai_usage(data.get("usage")) or Usage(),
        logprobs=openai_logprobs(choice.get("logprobs")),
        receipts=openai_receipts(data, choice),
        sampling_record=parse_sampling_record(choice),
        trace=parse_trace(choice.get("trace")),
        rid=data.get("id"),
        raw=data,
    )


def matched_stop(choice: Mapping[str, Any]) -> int | str | None:
    """Return the stop token or string that ended a choice: SGLang's `matched_stop`, vLLM's `stop_reason`."""
    matched: int | str | None = choice.get("matched_stop", choice.get("stop_reason"))
    return matched


def _raise_first(errors: Iterable[ReportedError | None], partial: Any) -> None:
    for error in errors:
        if error is not None:
            raise error.as_generation_error(partial)
