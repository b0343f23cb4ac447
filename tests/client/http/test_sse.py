"""Server-sent events and the two dialects, fed by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from logitship.client.errors import GenerationError, TransportError
from logitship.client.http.sse import Dialect, OpenAIDialect, SGLangDialect, SSEDecoder, StreamReader
from logitship.client.records import FinishReason, GenerationChunk, Receipt, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def decode(pieces: Iterable[bytes]) -> list[str]:
    decoder = SSEDecoder()
    return [data for piece in pieces for data in decoder.feed(piece)]


def read(stream: bytes, dialect: Dialect) -> list[GenerationChunk]:
    reader = StreamReader(dialect)
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


def test_cumulative_chunks_become_deltas() -> None:
    stop = {"type": "stop", "matched": 2}
    receipt = {"digest": "sha256:00", "name": "P", "steps": 2, "milliseconds": 0.5}
    stream = (
        sglang("He", [5], prompt_tokens=3, completion_tokens=1)
        + sglang("He", [5, 6], prompt_tokens=3, completion_tokens=2)
        + sglang("Hello", [5, 6, 2], stop, prompt_tokens=3, completion_tokens=3, receipts=[receipt])
        + DONE
    )
    chunks = read(stream, SGLangDialect())
    assert [chunk.text for chunk in chunks] == ["He", "", "llo"]
    assert [chunk.cumulative_text for chunk in chunks] == ["He", "He", "Hello"]
    assert [chunk.output_ids for chunk in chunks] == [(5,), (6,), (2,)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason("stop", 2)]
    assert chunks[-1].usage == Usage(3, 3, 0)
    assert chunks[-1].receipts == (Receipt("sha256:00", "P", 2, 0.5),)
    assert chunks[0].rid == "r1"


def test_incremental_chunks_of_an_sglang_started_that_way() -> None:
    stream = b"".join(sglang("ha", [5], completion_tokens=count) for count in (1, 2, 3)) + DONE
    chunks = read(stream, SGLangDialect())
    assert [chunk.cumulative_text for chunk in chunks] == ["ha", "haha", "hahaha"]
    assert [chunk.output_ids for chunk in chunks] == [(5,), (5,), (5,)]


def test_cumulative_chunks_without_token_ids_or_with_a_hidden_end_token() -> None:
    without = sglang("a", [], completion_tokens=1) + sglang("aa", [], completion_tokens=2) + DONE
    assert [chunk.text for chunk in read(without, SGLangDialect())] == ["a", "a"]
    hidden = sglang("aaa", [5, 5, 5], completion_tokens=3) + sglang("aaa", [5, 5, 5], completion_tokens=4) + DONE
    assert [chunk.text for chunk in read(hidden, SGLangDialect())] == ["aaa", ""]


def test_logprobs_of_a_chunk_are_those_of_its_tokens() -> None:
    stream = (
        sglang("a", [1], completion_tokens=1, output_token_logprobs=[[-0.1, 1, None]])
        + sglang("ab", [1, 2], completion_tokens=2, output_token_logprobs=[[-0.1, 1, None], [-0.2, 2, None]])
        + DONE
    )
    chunks = read(stream, SGLangDialect())
    assert [chunk.logprobs for chunk in chunks] == [(TokenLogprob(-0.1, 1),), (TokenLogprob(-0.2, 2),)]


def test_interleaved_continuations_are_kept_apart() -> None:
    stream = sglang("a", [1], index=0) + sglang("x", [8], index=1) + sglang("ab", [1, 2], index=0) + DONE
    assert [(chunk.index, chunk.text) for chunk in read(stream, SGLangDialect())] == [(0, "a"), (1, "x"), (0, "b")]


def test_chat_chunks() -> None:
    def choice(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    usage = event({"id": "c1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    stream = (
        choice({"role": "assistant", "content": ""}) + choice({"content": "Hi"}) + choice({}, "stop") + usage + DONE
    )
    chunks = read(stream, OpenAIDialect())
    assert [chunk.text for chunk in chunks] == ["", "Hi", "", ""]
    assert [chunk.cumulative_text for chunk in chunks] == ["", "Hi", "Hi", "Hi"]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason("stop"), None]
    assert [chunk.usage for chunk in chunks] == [None, None, None, Usage(3, 2, 0)]


def test_completions_chunks() -> None:
    stream = event({"choices": [{"index": 1, "text": "a"}]}) + event({"choices": [{"index": 1, "text": "b"}]}) + DONE
    assert [(chunk.index, chunk.cumulative_text) for chunk in read(stream, OpenAIDialect())] == [(1, "a"), (1, "ab")]


@pytest.mark.parametrize("tail", [b"", b"data: [DON", b"data: [DONE]\n"])
def test_a_stream_cut_before_done_is_a_transport_error(tail: bytes) -> None:
    reader = StreamReader(SGLangDialect())
    assert [chunk.text for chunk in reader.feed(sglang("Hi", [1]) + tail)] == ["Hi"]
    with pytest.raises(TransportError, match="in the middle of the stream"):
        reader.finish()


def test_nothing_after_done_is_read() -> None:
    reader = StreamReader(SGLangDialect())
    assert list(reader.feed(DONE + sglang("late", [1]))) == []
    assert list(reader.feed(b"data: not json\n\n")) == []
    reader.finish()


def test_an_error_event_ends_the_stream_with_what_there_is() -> None:
    reader = StreamReader(OpenAIDialect())
    list(reader.feed(event({"choices": [{"index": 0, "text": "so far"}]})))
    error = {"error": {"message": "boom", "type": "ProcessorFault", "traceback": "Traceback …"}}
    with pytest.raises(GenerationError, match="boom") as caught:
        list(reader.feed(event(error)))
    assert caught.value.type == "ProcessorFault"
    assert caught.value.traceback == "Traceback …"
    assert caught.value.partial.cumulative_text == "so far"


def test_an_error_event_may_come_first() -> None:
    with pytest.raises(GenerationError) as caught:
        list(StreamReader(SGLangDialect()).feed(event({"error": {"message": "boom"}})))
    assert caught.value.partial is None


def test_an_aborted_continuation_lets_the_others_of_its_batch_finish() -> None:
    abort = {"type": "abort", "message": "boom", "err_type": "ProcessorFault"}
    reader = StreamReader(SGLangDialect())
    stream = sglang("a", [1], abort, index=0) + sglang("x", [8], index=1) + sglang("xy", [8, 9], index=1) + DONE
    assert [chunk.cumulative_text for chunk in reader.feed(stream)] == ["a", "x", "xy"]
    with pytest.raises(GenerationError, match="boom") as caught:
        reader.finish()
    assert caught.value.partial.cumulative_text == "a"


@pytest.mark.parametrize("data", [b"not json", b"[]", b"5", b'{"text": "a"}', b'{"meta_info": 5}', b'{"choices": 5}'])
@pytest.mark.parametrize("dialect", [SGLangDialect, OpenAIDialect])
def test_a_malformed_event_is_a_transport_error(
    data: bytes, dialect: type[SGLangDialect] | type[OpenAIDialect]
) -> None:
    with pytest.raises(TransportError):
        list(StreamReader(dialect()).feed(b"data: " + data + b"\n\n"))
