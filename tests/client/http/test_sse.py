"""Parsing of server-sent events in both formats."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from logitship.client.errors import GenerationError, TransportError
from logitship.client.http.sse import OpenAIStream, SGLangStream, SSEDecoder, StreamFormat, StreamReader
from logitship.client.records import FinishReason, GenerationChunk, Receipt, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def decode(pieces: Iterable[bytes]) -> list[str]:
    decoder = SSEDecoder()
    return [data for piece in pieces for data in decoder.feed(piece)]


def read(stream: bytes, stream_format: StreamFormat) -> list[GenerationChunk]:
    reader = StreamReader(stream_format)
    chunks = list(reader.feed(stream))
    reader.finish()
    return chunks


def sglang(text: str, ids: list[int], finish: Any = None, index: int | None = None, **meta: Any) -> bytes:
    data = {"text": text, "output_ids": ids, "meta_info": {"id": "r1", "finish_reason": finish, **meta}}
    return event(data if index is None else data | {"index": index})


EVENTS = (
    ": a comment\r\n"
    "data: one\r\n\r\n"
    "event: message\ndata:two\nid: 5\n\n"
    "data: three\rdata: lines\r\r"
    "\n\n"
    "data: grüße 🚀 \u2028 end\n\n"
    "retry: 5\n\n"
    "data\n\n"
    "data: [DONE]\r\n\r\n"
    "data: cut off"
).encode()
DATA = ["one", "two", "three\nlines", "grüße 🚀 \u2028 end", "", "[DONE]"]


def test_events_split_at_every_byte() -> None:
    assert decode([EVENTS]) == DATA
    assert decode(bytes([byte]) for byte in EVENTS) == DATA
    for at in range(len(EVENTS) + 1):
        assert decode([EVENTS[:at], EVENTS[at:]]) == DATA, at


def test_events_split_at_random() -> None:
    rng = random.Random(5)
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(EVENTS) + 1), k=rng.randrange(12)))
        pieces = [EVENTS[a:b] for a, b in zip([0, *cuts], [*cuts, len(EVENTS)], strict=True)]
        assert decode(pieces) == DATA, cuts


def test_cumulative_events_become_deltas() -> None:
    stop = {"type": "stop", "matched": 2}
    receipt = {"digest": "sha256:00", "name": "P", "steps": 2, "milliseconds": 0.5}
    stream = (
        sglang("He", [5], prompt_tokens=3, completion_tokens=1)
        + sglang("He", [5, 6], prompt_tokens=3, completion_tokens=2)
        + sglang("Hello", [5, 6, 2], stop, prompt_tokens=3, completion_tokens=3, receipts=[receipt])
        + DONE
    )
    chunks = read(stream, SGLangStream())
    assert [chunk.text for chunk in chunks] == ["He", "", "llo"]
    assert [chunk.cumulative_text for chunk in chunks] == ["He", "He", "Hello"]
    assert [chunk.output_ids for chunk in chunks] == [(5,), (6,), (2,)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason("stop", 2)]
    assert chunks[-1].usage == Usage(3, 3, 0)
    assert chunks[-1].receipts == (Receipt("sha256:00", "P", 2, 0.5),)
    assert chunks[0].rid == "r1"


def test_incremental_events() -> None:
    stream = b"".join(sglang("ha", [5], completion_tokens=count) for count in (1, 2, 3)) + DONE
    chunks = read(stream, SGLangStream())
    assert [chunk.cumulative_text for chunk in chunks] == ["ha", "haha", "hahaha"]
    assert [chunk.output_ids for chunk in chunks] == [(5,), (5,), (5,)]


def test_cumulative_events_without_all_token_ids() -> None:
    without = sglang("a", [], completion_tokens=1) + sglang("aa", [], completion_tokens=2) + DONE
    assert [chunk.text for chunk in read(without, SGLangStream())] == ["a", "a"]
    hidden = sglang("aaa", [5, 5, 5], completion_tokens=3) + sglang("aaa", [5, 5, 5], completion_tokens=4) + DONE
    assert [chunk.text for chunk in read(hidden, SGLangStream())] == ["aaa", ""]


def test_chunk_logprobs_match_its_tokens() -> None:
    stream = (
        sglang("a", [1], completion_tokens=1, output_token_logprobs=[[-0.1, 1, None]])
        + sglang("ab", [1, 2], completion_tokens=2, output_token_logprobs=[[-0.1, 1, None], [-0.2, 2, None]])
        + DONE
    )
    chunks = read(stream, SGLangStream())
    assert [chunk.logprobs for chunk in chunks] == [(TokenLogprob(-0.1, 1),), (TokenLogprob(-0.2, 2),)]


def test_interleaved_continuations() -> None:
    stream = sglang("a", [1], index=0) + sglang("x", [8], index=1) + sglang("ab", [1, 2], index=0) + DONE
    assert [(chunk.index, chunk.text) for chunk in read(stream, SGLangStream())] == [(0, "a"), (1, "x"), (0, "b")]


def test_chat_chunks() -> None:
    def choice(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    usage = event({"id": "c1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    stream = (
        choice({"role": "assistant", "content": ""}) + choice({"content": "Hi"}) + choice({}, "stop") + usage + DONE
    )
    chunks = read(stream, OpenAIStream())
    assert [chunk.text for chunk in chunks] == ["", "Hi", "", ""]
    assert [chunk.cumulative_text for chunk in chunks] == ["", "Hi", "Hi", "Hi"]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason("stop"), None]
    assert [chunk.usage for chunk in chunks] == [None, None, None, Usage(3, 2, 0)]


def test_completions_chunks() -> None:
    stream = event({"choices": [{"index": 1, "text": "a"}]}) + event({"choices": [{"index": 1, "text": "b"}]}) + DONE
    assert [(chunk.index, chunk.cumulative_text) for chunk in read(stream, OpenAIStream())] == [(1, "a"), (1, "ab")]


@pytest.mark.parametrize("tail", [b"", b"data: [DON", b"data: [DONE]\n"])
def test_truncated_stream_is_transport_error(tail: bytes) -> None:
    reader = StreamReader(SGLangStream())
    assert [chunk.text for chunk in reader.feed(sglang("Hi", [1]) + tail)] == ["Hi"]
    with pytest.raises(TransportError, match="in the middle of the stream"):
        reader.finish()


def test_events_after_done_are_ignored() -> None:
    reader = StreamReader(SGLangStream())
    assert list(reader.feed(DONE + sglang("late", [1]))) == []
    assert list(reader.feed(b"data: not json\n\n")) == []
    reader.finish()


def test_error_event_ends_stream_with_partial() -> None:
    reader = StreamReader(OpenAIStream())
    list(reader.feed(event({"choices": [{"index": 0, "text": "so far"}]})))
    error = {"error": {"message": "boom", "type": "ProcessorFault", "traceback": "Traceback …"}}
    with pytest.raises(GenerationError, match="boom") as caught:
        list(reader.feed(event(error)))
    assert caught.value.type == "ProcessorFault"
    assert caught.value.traceback == "Traceback …"
    assert caught.value.partial.cumulative_text == "so far"


def test_error_event_first() -> None:
    with pytest.raises(GenerationError) as caught:
        list(StreamReader(SGLangStream()).feed(event({"error": {"message": "boom"}})))
    assert caught.value.partial is None


def test_aborted_continuation_does_not_stop_batch() -> None:
    abort = {"type": "abort", "message": "boom", "err_type": "ProcessorFault"}
    reader = StreamReader(SGLangStream())
    stream = sglang("a", [1], abort, index=0) + sglang("x", [8], index=1) + sglang("xy", [8, 9], index=1) + DONE
    assert [chunk.cumulative_text for chunk in reader.feed(stream)] == ["a", "x", "xy"]
    with pytest.raises(GenerationError, match="boom") as caught:
        reader.finish()
    assert caught.value.partial.cumulative_text == "a"


@pytest.mark.parametrize("data", [b"not json", b"[]", b"5", b'{"text": "a"}', b'{"meta_info": 5}', b'{"choices": 5}'])
@pytest.mark.parametrize("stream_format", [SGLangStream, OpenAIStream])
def test_malformed_event_is_transport_error(
    data: bytes, stream_format: type[SGLangStream] | type[OpenAIStream]
) -> None:
    with pytest.raises(TransportError):
        list(StreamReader(stream_format()).feed(b"data: " + data + b"\n\n"))
