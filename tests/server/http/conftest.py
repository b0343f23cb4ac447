"""A scripted engine without a model, and clients of an app on top of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.records import Receipt
from logitship.client.serialization.processor_string import InstalledProcessor, PickledProcessor, ProcessorString
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.app import create_app
from logitship.server.metrics.engine_stats import EngineStats, ModelInfo
from logitship.server.metrics.observed_metrics import EngineMetrics
from logitship.server.processors.artifact_store import ArtifactStore
from logitship.server.processors.request_processors import RequestProcessors
from logitship.server.refusals import BadRequest, Forbidden, NotFound, RequestRefused
from logitship.server.requests.body_limits import QueuedBody, QueuedBytes
from logitship.server.requests.fair_pool import FairPool
from logitship.server.requests.messages import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    GenerationStream,
    RequestError,
    TokenLogprobs,
)
from logitship.server.requests.request_validation import Limits, check
from logitship.server.tokenizer import Tokenizer

Script = Callable[[GenerationRequest], list[GenerationChunk]]

EOS = 0
FAULT = RequestError(
    "ProcessorFault",
    "the processor Bad raised ZeroDivisionError",
    400,
    "Traceback: 1/0",
    "sha256:" + "0" * 64,
    "Bad",
    "exception",
)
BAN = ProcessorInfo(
    id="ban", kind="installed", name="ban", description="Bans tokens.", params_schema={"type": "object"}, is_mask=True
)
MINE = ProcessorInfo(
    id="Mine@1", kind="registered", name="Mine", version=1, digest="sha256:" + "2" * 64, form="source", size=15
)


class ByteTokenizer(Tokenizer):
    """Tokenizer with one token per UTF-8 byte."""

    def __init__(self) -> None:
        pass

    @property
    def longest_token(self) -> int:  # type: ignore[override]
        return 8

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return False

    def template_uses(self, variable: str) -> bool:
        return variable in ("reasoning_effort", "tools")

    def template_contains(self, text: str) -> bool:
        return text == "<tool_call>"

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        self.messages = messages
        if messages[0]["content"] == "refuse me":
            raise ValueError("the chat template refuses the messages: no")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        text += "".join(f"|{key}={value}" for key, value in template_kwargs.items())
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


def _logprobs(token_id: int, top: int | None) -> list[TokenLogprobs]:
    if top is None:
        return []
    others = tuple((token_id + i, -0.5 * (i + 1)) for i in range(top))
    return [TokenLogprobs(token_id, -0.5, 1, others)]


def emit_text(text: str) -> Script:
    """Create a script with one token per chunk and an EOS token, within `max_tokens`, with all requested details."""

    def script(request: GenerationRequest) -> list[GenerationChunk]:
        params = request.sampling_params
        tokens = [*text.encode(), EOS][: params.max_tokens]
        prompt: list[TokenLogprobs] = []
        if params.prompt_logprobs is not None:
            for position in range(params.prompt_logprobs_start, len(request.prompt_token_ids)):
                token_id = request.prompt_token_ids[position]
                known = TokenLogprobs(token_id, None, None) if position == 0 else _logprobs(token_id, 1)[0]
                prompt.append(known)
        receipts = tuple(Receipt("sha256:" + "1" * 64, "Mine", len(tokens), 0.25) for _ in request.processors)
        ended = FinishReason("stop", EOS) if EOS in tokens else FinishReason("length")
        if not tokens:
            return [
                GenerationChunk(
                    index=index,
                    text="",
                    token_ids=[],
                    prompt_logprobs=prompt,
                    finish_reason=ended,
                    prompt_tokens=len(request.prompt_token_ids),
                    completion_tokens=0,
                    receipts=receipts,
                )
                for index in range(request.num_sequences)
            ]
        return [
            GenerationChunk(
                index=index,
                text="" if token == EOS else chr(token),
                token_ids=[token],
                logprobs=_logprobs(token, params.logprobs),
                prompt_logprobs=prompt if place == 0 else [],
                finish_reason=ended if place == len(tokens) - 1 else None,
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=place + 1,
                receipts=receipts if place == len(tokens) - 1 else (),
            )
            for place, token in enumerate(tokens)
            for index in range(request.num_sequences)
        ]

    return script


def fail_after_one(request: GenerationRequest) -> list[GenerationChunk]:
    """Script with one token, then a processor's fault."""
    begin = GenerationChunk(index=0, text="a", token_ids=[97], prompt_tokens=1, completion_tokens=1)
    reason = FinishReason("abort", error=FAULT)
    end = GenerationChunk(index=0, text="", token_ids=[], finish_reason=reason, prompt_tokens=1, completion_tokens=1)
    return [begin, end]


class FakeStream(GenerationStream):
    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self._fake = engine
        self._request = request
        self.digests = ["sha256:" + "1" * 64 for _ in request.processors]

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        for chunk in self._fake.script(self._request):
            await asyncio.sleep(0)
            if self._fake.hangs and chunk.finish_reason is not None:
                self._fake.hung.set()
                await asyncio.Event().wait()
            yield chunk

    async def aclose(self) -> None:
        self._fake.closed.append(self._request.rid)
        self._fake.stream_closed.set()


class FakeProcessors(RequestProcessors):
    """Has two processors, `BAN` and `MINE`."""

    def __init__(self, pool: FairPool) -> None:
        self.artifacts = ArtifactStore(max_bytes=1 << 16)
        self._keep_artifact = self.artifacts.add
        self._pool = pool
        self.asked_for: list[tuple[str, str, str]] = []
        """Method, processor name and tenant per call."""

    def pin(self, request: GenerationRequest, pins: dict[ProcessorString, ProcessorString]) -> GenerationRequest:
        return request

    def ships_code(self, string: ProcessorString, tenant: str) -> bool:
        return not isinstance(string, InstalledProcessor)

    def list_all(self, tenant: str) -> list[ProcessorInfo]:
        return [BAN, MINE]

    def details(self, reference: str, tenant: str) -> ProcessorDetails:
        self.asked_for.append(("details", reference, tenant))
        if reference != MINE.id:
            raise NotFound(f"no {reference}", param="id")
        return ProcessorDetails(**vars(MINE), source="class Mine: ...", class_name="Mine")

    def delete(self, reference: str, tenant: str) -> list[str]:
        self.asked_for.append(("delete", reference, tenant))
        if reference == BAN.id:
            raise Forbidden("ban is installed", param="id")
        return [f"{reference}@1", f"{reference}@2"]


class FakeEngine(AsyncEngine):
    """Validates requests like the real engine, then follows `script`."""

    accepting = True  # type: ignore[assignment]

    def __init__(self, config: ServerConfig) -> None:
        self._initial_config = config
        self.pool = FairPool(2, 100, "test-pool")
        model = ModelInfo("tiny", "/models/tiny", 256, 64, frozenset({EOS}), "float32", "cpu", "TinyForCausalLM")
        self.metrics = EngineMetrics(model, {})
        self.metrics.watch(lambda: self.stats())
        self.model = self._initial_model = model
        self.reset()

    def reset(self) -> None:
        """Clear all but the metrics and the pool, for the next test. Creating an engine and its app takes 20 ms."""
        self.config = self._initial_config
        self.model = self._initial_model
        self.tokenizer = ByteTokenizer()
        self.script: Script = emit_text("Hi!")
        self.hangs = False
        """Streams hang before their last chunk."""
        self.hung = threading.Event()
        self.stream_closed = threading.Event()
        """Set when a stream is closed."""
        self.requests: list[GenerationRequest] = []
        self.closed: list[str] = []
        self.aborted: list[tuple[str | None, str]] = []
        """Request id (None: all) and tenant per call."""
        self.registered: list[tuple[ProcessorString, str]] = []
        """Processor string and tenant per call."""
        self.processors = FakeProcessors(self.pool)
        self.queued_bytes = QueuedBytes(self.config.max_queued_bytes, self.config.max_queued_bytes_per_tenant)
        self.refusals: dict[str, Exception] = {}
        """Exceptions that `submit` raises, by request id."""
        self.refuse_all: Exception | None = None
        self.accepting = True
        self.idle = True
        self.alive = True
        self.unready: RequestRefused | None = None

    async def check_ready(self) -> None:
        if self.unready is not None:
            raise self.unready

    async def submit(self, request: GenerationRequest, body: QueuedBody | None = None) -> GenerationStream:
        limits = Limits.of(self.config, self.model.vocab_size, self.model.max_model_len)
        check(request, limits, None if body is None else body.depth)
        if self.refuse_all is not None:
            raise self.refuse_all
        if request.rid in self.refusals:
            raise self.refusals[request.rid]
        for processor in request.processors:
            if isinstance(processor.string, PickledProcessor) and processor.string.payload == b"no pickle":
                raise BadRequest("cannot be unpickled", param="custom_logit_processor")
        self.requests.append(request)
        return FakeStream(self, request)

    async def register(self, string: ProcessorString, tenant: str = "", name: str | None = None) -> ProcessorInfo:
        if isinstance(string, PickledProcessor) and string.payload == b"no pickle":
            raise BadRequest("cannot be unpickled")
        self.registered.append((string, tenant))
        return replace(MINE, id=f"{name or 'Mine'}@1", name=name or "Mine")

    def abort(self, rid: str | None, tenant: str = "") -> None:
        self.aborted.append((rid, tenant))

    async def flush_cache(self) -> bool:
        return self.idle

    def others_run(self, tenant: str) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(running=1, waiting=2, steps=3, accepting=self.accepting)

    @property
    def healthy(self) -> bool:
        return self.alive


class AppClient:
    """A TestClient that parses the event streams."""

    def __init__(self, app: FastAPI) -> None:
        self.http = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)

    def post(self, path: str, body: Any) -> Any:
        return self.http.post(path, json=body)

    def ok(self, path: str, body: Any) -> Any:
        """Post a request that must succeed. Returns the JSON body."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """Post a request with `stream`. Returns the data of the events, without [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("\n\n")
        *data, done = [line.removeprefix("data: ") for line in answer.text.removesuffix("\n\n").split("\n\n")]
        assert done == "[DONE]"
        return [orjson.loads(each) for each in data]


SMALL = ServerConfig(model_path="tiny", max_request_bytes=1 << 16, max_processor_size=1 << 12, max_queued_requests=64)


@pytest.fixture(scope="module")
def reused_engine() -> FakeEngine:
    return FakeEngine(SMALL)


@pytest.fixture(scope="module")
def reused_shipping_engine() -> FakeEngine:
    return FakeEngine(replace(SMALL, enable_custom_logit_processor=True))


@pytest.fixture
def new_engine() -> FakeEngine:
    """An engine whose metrics and thread pool no other test has used."""
    return FakeEngine(SMALL)


@pytest.fixture
def engine(reused_engine: FakeEngine) -> FakeEngine:
    reused_engine.reset()
    return reused_engine


@pytest.fixture
def shipping_engine(reused_shipping_engine: FakeEngine) -> FakeEngine:
    """An engine that accepts shipped code."""
    reused_shipping_engine.reset()
    return reused_shipping_engine


@pytest.fixture(scope="module")
def app_of() -> Callable[[FakeEngine], FastAPI]:
    """Creates the app of an engine, once."""
    return cache(create_app)


@pytest.fixture
def client(engine: FakeEngine, app_of: Callable[[FakeEngine], FastAPI]) -> Iterator[AppClient]:
    app_client = AppClient(app_of(engine))
    yield app_client
    app_client.http.close()


@pytest.fixture
def shipping_client(shipping_engine: FakeEngine, app_of: Callable[[FakeEngine], FastAPI]) -> Iterator[AppClient]:
    app_client = AppClient(app_of(shipping_engine))
    yield app_client
    app_client.http.close()


@pytest.fixture(scope="session")
def make_client() -> Callable[[FakeEngine], AppClient]:
    """Creates a client for an engine."""
    return lambda engine: AppClient(create_app(engine))


@pytest.fixture
def make_fake_engine() -> Callable[..., FakeEngine]:
    """Creates an engine with these settings."""
    return lambda **settings: FakeEngine(ServerConfig(model_path="tiny", **settings))


@pytest.fixture
def text_script() -> Callable[[str], Script]:
    return emit_text


@pytest.fixture
def failing() -> Script:
    return fail_after_one


@pytest.fixture
def refusal() -> RequestRefused:
    return BadRequest("no", param="temperature")
