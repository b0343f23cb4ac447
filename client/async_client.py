"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import httpx

from logitship.client.http.http_requests import HttpRequest
from logitship.client.http.request_options import (
    Batch,
    ChatOptions,
    CompletionOptions,
    GenerateOptions,
    Message,
    ProcessorLike,
    Prompt,
)
from logitship.client.http.responses import (
    parse_error,
    parse_generate,
    parse_models,
    parse_openai,
    parse_registered,
    read_response,
)
from logitship.client.http.retries import RetryPolicy
from logitship.client.http.server_dialect import ServerDialect, ServerKind
from logitship.client.http.sse import OpenAIStream, SGLangStream, StreamReader
from logitship.client.http.transport import (
    DEFAULT_BASE_URL,
    DEFAULT_TIMEOUT,
    ClientPerLoop,
    check_base_url,
    client_headers,
    http_request,
    transport_errors,
    was_sent,
)
from logitship.client.serialization.artifact import Artifact, raw_bytes
from logitship.client.serialization.processor_string import RegisteredProcessor

from .errors import APIStatusError, NotFoundError, TransportError
from .http import http_requests as requests
from .processor_info import ProcessorDetails, ProcessorInfo, parse_deleted, parse_processor, parse_processors
from .records import Generation, GenerationChunk, Model

T = TypeVar("T")


class AsyncClient:
    """Asyncio version of `Client`, with the same arguments, methods, records and errors.

    It may be used in one event loop after the other, as by several `asyncio.run`, and in several at once. Each has its
    own connections, but for a `transport` that you give: that belongs to the loop in which it is first used.

    Streams are async generators. To stop one early, use `contextlib.aclosing`: otherwise its request runs until the
    generator is garbage-collected.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        dialect: ServerKind = "auto",
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = DEFAULT_TIMEOUT,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        make = partial(
            httpx.AsyncClient,
            base_url=check_base_url(base_url),
            headers=client_headers(api_key, headers),
            timeout=timeout,
            transport=transport,
            verify=transport is not None or httpx.create_ssl_context(),  # one for all loops: it takes long to create
        )
        self._clients = ClientPerLoop(make, is_shared=transport is not None)
        self._dialect = ServerDialect(dialect, httpx.URL(base_url).netloc.decode("ascii"))
        self._retries = RetryPolicy(max_retries)
        self._sleep = sleep

    async def close(self) -> None:
        """Close the connections."""
        await self._clients.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @overload
    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation: ...
    @overload
    async def generate(
        self, prompt: Batch, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...
    @overload
    async def generate(self, prompt: Prompt, *, n: int, **options: Unpack[GenerateOptions]) -> list[Generation]: ...
    async def generate(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation]:
        """See `Client.generate`."""
        request = requests.generate(prompt, n, options, stream=False)
        return await self._generation(request, many=requests.is_many(prompt, n))

    def generate_stream(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationChunk]:
        """See `Client.generate_stream`."""
        return self._stream(requests.generate(prompt, n, options, stream=True))

    @overload
    async def completions(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Generation: ...
    @overload
    async def completions(
        self, prompt: Batch, *, n: int | None = None, **options: Unpack[CompletionOptions]
    ) -> list[Generation]: ...
    @overload
    async def completions(
        self, prompt: Prompt, *, n: int, **options: Unpack[CompletionOptions]
    ) -> list[Generation]: ...
    async def completions(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[CompletionOptions]
    ) -> Generation | list[Generation]:
        """See `Client.completions`."""
        request = requests.completions(prompt, n, options, stream=False)
        return await self._generation(request, many=requests.is_many(prompt, n))

    def completions_stream(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[CompletionOptions]
    ) -> AsyncGenerator[GenerationChunk]:
        """See `Client.completions_stream`."""
        return self._stream(requests.completions(prompt, n, options, stream=True))

    @overload
    async def chat(self, messages: list[Message], **options: Unpack[ChatOptions]) -> Generation: ...
    @overload
    async def chat(self, messages: list[Message], *, n: int, **options: Unpack[ChatOptions]) -> list[Generation]: ...
    async def chat(
        self, messages: list[Message], *, n: int | None = None, **options: Unpack[ChatOptions]
    ) -> Generation | list[Generation]:
        """See `Client.chat`."""
        request = requests.chat(messages, n, options, stream=False)
        return await self._generation(request, many=n is not None)

    def chat_stream(
        self, messages: list[Message], *, n: int | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[GenerationChunk]:
        """See `Client.chat_stream`."""
        return self._stream(requests.chat(messages, n, options, stream=True))

    async def register(self, processor: ProcessorLike, name: str | None = None) -> RegisteredProcessor:
        """See `Client.register`."""
        registration = requests.register(processor, name)
        try:
            for artifact in registration.artifacts:
                await self._upload(artifact)
        except NotFoundError:  # a server without artifacts
            registration = requests.register(processor, name, artifact_size=None)
        return await self._call(await self._in_dialect(registration.request), parse_registered)

    async def upload_artifact(self, data: Any) -> str:
        """Upload the bytes of a tensor or array, unless the server has them. `register` does so for those of a class.

        Args:
            data: a CPU tensor, a NumPy array, or bytes.

        Returns:
            Its digest. Classes that use an equal tensor refer to it.
        """
        artifact = Artifact.of(raw_bytes(data))
        await self._upload(artifact)
        return artifact.digest

    async def processors(self) -> list[ProcessorInfo]:
        """See `Client.processors`."""
        return await self._call(requests.get("/v1/processors"), parse_processors)

    async def processor(self, id: str | RegisteredProcessor) -> ProcessorDetails:
        """See `Client.processor`."""
        return await self._call(requests.processor(id), parse_processor)

    async def delete_processor(self, id: str | RegisteredProcessor) -> list[str]:
        """See `Client.delete_processor`."""
        return await self._call(requests.delete_processor(id), parse_deleted)

    async def models(self) -> list[Model]:
        """See `Client.models`."""
        return await self._call(requests.get("/v1/models"), parse_models)

    async def model_info(self) -> dict[str, Any]:
        """See `Client.model_info`."""
        return await self._call(requests.get("/get_model_info"), dict[str, Any])

    async def server_info(self) -> dict[str, Any]:
        """See `Client.server_info`."""
        return await self._call(requests.get("/server_info"), dict[str, Any])

    async def health(self) -> bool:
        """See `Client.health`."""
        try:
            return (await self._attempt(requests.get("/health"))).is_success
        except TransportError:
            return False

    async def abort(self, rid: str) -> None:
        """See `Client.abort`."""
        await self._send(requests.abort(rid))

    async def abort_all(self) -> None:
        """See `Client.abort_all`."""
        await self._send(requests.abort(None))

    async def flush_cache(self) -> None:
        """See `Client.flush_cache`."""
        await self._send(requests.flush_cache())

    async def _upload(self, artifact: Artifact) -> None:
        try:
            await self._send(requests.find_artifact(artifact.digest))
        except NotFoundError:
            await self._send(requests.upload_artifact(artifact))

    async def _call(self, request: HttpRequest, parse: Callable[[Any], T]) -> T:
        return read_response((await self._send(request)).content, parse)

    async def _generation(self, request: HttpRequest, *, many: bool) -> Generation | list[Generation]:
        request = await self._in_dialect(request)
        if request.path == "/generate":
            return await self._call(request, partial(parse_generate, many=many))
        return await self._call(request, partial(parse_openai, many=many, fault_token=request.fault_token))

    async def _stream(self, request: HttpRequest) -> AsyncGenerator[GenerationChunk]:
        request = await self._in_dialect(request)
        sglang = request.path == "/generate"
        reader = StreamReader(SGLangStream() if sglang else OpenAIStream(request.fault_token))
        response = await self._send(request)
        try:
            with transport_errors(self._clients.get()):
                async for piece in response.aiter_bytes():
                    for chunk in reader.feed(piece):
                        yield chunk
        finally:
            await response.aclose()
        reader.finish()

    async def _in_dialect(self, request: HttpRequest) -> HttpRequest:
        while (probe := self._dialect.probe_before(request)) is not None:
            try:
                result: bytes | APIStatusError = (await self._send(probe)).content
            except APIStatusError as error:
                result = error
            self._dialect.handle_probe(probe, result)
        return self._dialect.translate(request)

    async def _send(self, request: HttpRequest) -> httpx.Response:
        attempt = 0
        while True:
            try:
                response = await self._attempt(request)
            except TransportError as error:
                delay = self._retries.delay_after_failure(request, attempt, sent=was_sent(error))
                if delay is None:
                    raise
            else:
                if response.is_success:
                    return response
                delay = self._retries.delay_after_status(request, attempt, response.status_code, response.headers)
                if delay is None:
                    raise parse_error(response.status_code, response.content)
            await self._sleep(delay)
            attempt += 1

    async def _attempt(self, request: HttpRequest) -> httpx.Response:
        http = self._clients.get()
        with transport_errors(http):
            response = await http.send(http_request(http, request), stream=request.stream)
            if not response.is_success:
                await response.aread()
            return response
