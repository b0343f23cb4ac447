"""Server-sent events, and the two dialects that the servers speak over them.

`StreamReader.feed` takes the bytes as they arrive and gives the chunks that they complete: it never waits and never
reads, so the sync and the async client share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from logitship.client.errors import GenerationError, TransportError
from logitship.client.records import GenerationChunk

from .error_responses import Problem, problem_in
from .responses import (
    malformed_as_transport_error,
    matched_stop,
    openai_logprobs,
    openai_receipts,
    openai_usage,
    parse_finish_reason,
    parse_receipts,
    parse_trace,
    problem_of_choice,
    problem_of_finish,
    sglang_logprobs,
    sglang_usage,
)

_DONE = "[DONE]"


class SSEDecoder:
    """Bytes of a `text/event-stream` to the `data` of its events, as the WHATWG HTML standard says (section 9.2.6).

    Lines end with CR LF, LF or CR and with nothing else: `str.splitlines` (and with it httpx's `iter_lines`) would also
    break at U+2028, which JSON may hold. Lines are cut as bytes and then decoded, so that a character which arrives in
    two pieces stays whole.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """The `data` of every event that `piece` completes."""
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


class Dialect(Protocol):
    """How a route's events become chunks."""

    def chunks(self, event: dict[str, Any]) -> Iterator[tuple[GenerationChunk, Problem | None]]:
        """The chunks of one event, each with what ended its continuation, where that is an error."""
        ...


class StreamReader:
    """Reads one stream: feed it bytes, then `finish`."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._decoder = SSEDecoder()
        self._last: GenerationChunk | None = None
        self._failed: GenerationError | None = None
        self.done = False
        """The stream said that it is complete."""

    def feed(self, piece: bytes) -> Iterator[GenerationChunk]:
        """The chunks that `piece` completes.

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
        """To be called when no more bytes come.

        Raises:
            GenerationError: a continuation was ended by an error; only now, because the others of its batch go on.
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
        if problem := problem_in(event):
            raise problem.as_generation_error(self._last)
        with malformed_as_transport_error(data[:200]):
            chunks = list(self._dialect.chunks(event))
        for chunk, failure in chunks:
            self._last = chunk
            if failure is not None and self._failed is None:
                self._failed = failure.as_generation_error(chunk)
            yield chunk


class _Progress:
    """What one continuation has sent so far."""

    def __init__(self) -> None:
        self.text = ""
        self.output_ids: list[int] = []
        self.logprobs = 0
        self.traced = 0


class SGLangDialect:
    """`/generate`: each event holds the continuation's whole text so far, and its whole lists."""

    def __init__(self) -> None:
        self._progress: dict[int, _Progress] = {}

    def chunks(self, event: dict[str, Any]) -> Iterator[tuple[GenerationChunk, Problem | None]]:
        """One event is one chunk."""
        meta = event["meta_info"]
        index = event.get("index", 0)
        so_far = self._progress.setdefault(index, _Progress())
        text, output_ids = event.get("text") or "", event.get("output_ids") or []
        logprobs = sglang_logprobs(meta, "output")
        # Only logitship makes traces, whose lists always hold everything so far.
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
                trace=trace,
                rid=meta.get("id"),
                raw=event,
            ),
            problem_of_finish(meta),
        )

    def _is_increment(self, so_far: _Progress, output_ids: list[int], meta: dict[str, Any]) -> bool:
        """An SGLang started with `--incremental-streaming-output` sends only what is new. Its events do not say so, but
        then the ids of all events together are as many as the tokens that it counts."""
        if not so_far.output_ids or not output_ids:
            return False
        return len(so_far.output_ids) + len(output_ids) == meta.get("completion_tokens")


class OpenAIDialect:
    """`/v1/completions` and `/v1/chat/completions`: each event holds what is new in some choices.

    Args:
        fault_token: see `HttpRequest`.
    """

    def __init__(self, fault_token: int | None = None) -> None:
        self._text: dict[int, str] = {}
        self._fault_token = fault_token

    def chunks(self, event: dict[str, Any]) -> Iterator[tuple[GenerationChunk, Problem | None]]:
        """One chunk a choice; one without text for an event that only counts tokens."""
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
                    trace=parse_trace(choice.get("trace")),
                    rid=event.get("id"),
                    raw=event,
                ),
                problem_of_choice(choice, self._fault_token),
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
