"""Parsing of server-sent events, in the formats of SGLang and OpenAI.

`StreamReader.feed` takes the bytes as they arrive and yields the chunks that they complete. It does no I/O, so the sync
and the async client share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from logitship.client.errors import GenerationError, TransportError
from logitship.client.records import GenerationChunk

from .error_responses import ReportedError, parse_error_body
from .responses import (
    choice_error,
    finish_error,
    malformed_as_transport_error,
    matched_stop,
    openai_logprobs,
    openai_receipts,
    openai_usage,
    parse_finish_reason,
    parse_receipts,
    parse_sampling_record,
    parse_trace,
    sglang_logprobs,
    sglang_usage,
)

_DONE = "[DONE]"


class SSEDecoder:
    """Decoder of a `text/event-stream` to the `data` of its events (WHATWG HTML standard, section 9.2.6).

    Lines only end with CR LF, LF or CR: `str.splitlines` (and httpx's `iter_lines`) would also break at U+2028, which
    JSON may contain. Lines are split as bytes and then decoded, so that a character that arrives in two pieces stays
    whole.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the `data` of every event that `piece` completes."""
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_cr = False
        if not piece:
            return
        self._after_cr = piece.endswith(b"\r")
        *complete, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for end_of_line in complete:
            line = bytes(self._line + end_of_line).decode(errors="replace")
            self._line.clear()
            if line:
                self._take_field(line)
            elif self._data:
                yield "\n".join(self._data)
                self._data.clear()
        self._line += rest

    def _take_field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))


class StreamFormat(Protocol):
    """Conversion of the events of a route to chunks."""

    def chunks(self, event: dict[str, Any]) -> Iterator[tuple[GenerationChunk, ReportedError | None]]:
        """Yield the chunks of one event, each with the error that ended its continuation, or None."""
        ...


class StreamReader:
    """Reader of one stream: call `feed` with the bytes, then `finish`."""

    def __init__(self, stream_format: StreamFormat) -> None:
        self._format = stream_format
        self._decoder = SSEDecoder()
        self._last: GenerationChunk | None = None
        self._failed: GenerationError | None = None
        self.done = False
        """True once the stream has sent `[DONE]`."""

    def feed(self, piece: bytes) -> Iterator[GenerationChunk]:
        """Yield the chunks that `piece` completes.

        Raises:
            GenerationError: the server reports an error of the whole stream.
            TransportError: an event is not JSON.
        """
        for data in self._decoder.feed(piece):
            if data == _DONE:
                self.done = True
            if self.done:
                return
            yield from self._read(data)

    def finish(self) -> None:
        """Check the stream after its last byte.

        Raises:
            GenerationError: a continuation was ended by an error. Raised only now, because the others of its batch
                continue.
            TransportError: the stream ended before it was complete.
        """
        if self._failed is not None:
            raise self._failed
        if not self.done:
            raise TransportError("the connection ended in the middle of the stream")

    def _read(self, data: str) -> Iterator[GenerationChunk]:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise TransportError(f"an event of the stream is not JSON: {data[:200]!r}") from None
        if error := parse_error_body(event):
            raise error.as_generation_error(self._last)
        with malformed_as_transport_error(data[:200]):
            chunks = list(self._format.chunks(event))
        for chunk, failure in chunks:
            self._last = chunk
            if failure is not None and self._failed is None:
                self._failed = failure.as_generation_error(chunk)
            yield chunk


class _Progress:
    """Part of one continuation received so far."""

    def __init__(self) -> None:
        self.text = ""
        self.output_ids: list[int] = []
        self.logprobs = 0
        self.traced = 0


class SGLangStream:
    """Events of `/generate`: each contains the whole text and the whole lists of a continuation so far."""

    def __init__(self) -> None:
        self._progress: dict[int, _Progress] = {}

    def chunks(self, event: dict[str, Any]) -> Iterator[tuple[GenerationChunk, ReportedError | None]]:
        """Yield one chunk per event."""
        meta = event["meta_info"]
        index = event.get("index", 0)
        so_far = self._progress.setdefault(index, _Progress())
        text, output_ids = event.get("text") or "", event.get("output_ids") or []
        logprobs = sglang_logprobs(meta, "output")
        # Only logitship sends traces, and their lists are always cumulative.
        entries = meta.get("trace")
        trace = parse_trace(entries and entries[so_far.traced :])
        so_far.traced += len(trace or ())
        if not self._is_increment(so_far, output_ids, meta):
            text = text[len(so_far.text) :]
            output_ids = output_ids[len(so_far.output_ids) :]
            logprobs = logprobs and logprobs[so_far.logprobs :]
        so_far.text += text
        so_far.output_ids += output_ids
        so_far.logprobs += len(logprobs or ())
        yield (
            GenerationChunk(
                text=text,
                cumulative_text=so_far.text,
                index=index,
                output_ids=tuple(output_ids),
                finish_reason=parse_finish_reason(meta.get("finish_reason")),
                usage=sglang_usage(meta),
                logprobs=logprobs,
                receipts=parse_receipts(meta.get("receipts")),
                sampling_record=parse_sampling_record(meta),
                trace=trace,
                rid=meta.get("id"),
                raw=event,
            ),
            finish_error(meta),
        )

    def _is_increment(self, so_far: _Progress, output_ids: list[int], meta: dict[str, Any]) -> bool:
        """Return whether the event is incremental: SGLang was started with `--incremental-streaming-output`.

        Its events do not say so, but then the token ids of all events add up to the number of tokens it reports.
        """
        if not so_far.output_ids or not output_ids:
            return False
        return len(so_far.output_ids) + len(output_ids) == meta.get("completion_tokens")


class OpenAIStream:
    """Events of `/v1/completions` and `/v1/chat/completions`: each contains the new part of some choices.

    Args:
        fault_token: see `HttpRequest`.
    """

    def __init__(self, fault_token: int | None = None) -> None:
        self._text: dict[int, str] = {}
        self._fault_token = fault_token

    def chunks(self, event: dict[str, Any]) -> Iterator[tuple[GenerationChunk, ReportedError | None]]:
        """Yield one chunk per choice; one without text for an event that only has token counts."""
        usage = openai_usage(event.get("usage"))
        for choice in event["choices"]:
            index = choice.get("index", 0)
            text = (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
            self._text[index] = self._text.get(index, "") + text
            yield (
                GenerationChunk(
                    text=text,
                    cumulative_text=self._text[index],
                    index=index,
                    output_ids=tuple(choice.get("token_ids") or ()),
                    finish_reason=parse_finish_reason(choice.get("finish_reason"), matched_stop(choice)),
                    usage=usage,
                    logprobs=openai_logprobs(choice.get("logprobs")),
                    receipts=openai_receipts(event, choice),
                    sampling_record=parse_sampling_record(choice),
                    trace=parse_trace(choice.get("trace")),
                    rid=event.get("id"),
                    raw=event,
                ),
                choice_error(choice, self._fault_token),
            )
        if not event["choices"]:
            yield (
                GenerationChunk(
                    text="",
                    cumulative_text=self._text.get(0, ""),
                    usage=usage,
                    receipts=parse_receipts(event.get("receipts")),
                    rid=event.get("id"),
                    raw=event,
                ),
                None,
            )
