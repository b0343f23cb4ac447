"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
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


class Client:
    """Client for logitship servers, stock SGLang, and vLLM with logitship's plugin.

    Safe to share between threads. Every method may raise `TransportError` (no usable response) and `APIStatusError` (a
    response with an error status); those that generate also `GenerationError` (accepted, then ended by an error). An
    invalid argument raises `TypeError` or `ValueError` before anything is sent.

    Args:
        base_url: address of the server, without `/v1`.
        dialect: the kind of server: "logitship", "sglang" or "vllm". "auto": detect it once, when it is first needed:
            before `generate`, and before a request with a processor.
        api_key: API key, sent as a bearer token.
        timeout: seconds without a byte from the server, or an `httpx.Timeout`; None: no timeout.
        max_retries: maximum number of retries where a retry is safe: connection refused, server busy, and requests
            that may run twice, which are all but generations and `delete_processor`.
        headers: additional headers of every request; `authorization` replaces that of `api_key`.
        transport: httpx transport, for proxies, certificates and tests.
        sleep: function that waits between attempts, in seconds.
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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http = httpx.Client(
            base_url=check_base_url(base_url),
            headers=client_headers(api_key, headers),
            timeout=timeout,
            transport=transport,
        )
        self._dialect = ServerDialect(dialect, self._http.base_url.netloc.decode("ascii"))
        self._retries = RetryPolicy(max_retries)
        self._sleep = sleep

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation: ...
    @overload
    def generate(
        self, prompt: Batch, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[GenerateOptions]) -> list[Generation]: ...
    def generate(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation]:
        """Continue a prompt, with SGLang's `/generate`; on vLLM, which lacks it, with `/v1/completions`.

        Args:
            prompt: text, token ids, or a list of one of them.
            n: number of continuations of each prompt.
            options: `processor`, `params`, the sampling parameters, and the others of `GenerateOptions`.

        Returns:
            One `Generation`; a list of them, prompt by prompt, if `prompt` is a list of prompts or `n` is given.
        """
        request = requests.generate(prompt, n, options, stream=False)
        return self._generation(request, many=requests.is_many(prompt, n))

    def generate_stream(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationChunk]:
        """Stream `generate` in chunks. Closing the iterator early cancels the request on the server."""
        return self._stream(requests.generate(prompt, n, options, stream=True))

    @overload
    def completions(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Generation: ...
    @overload
    def completions(
        self, prompt: Batch, *, n: int | None = None, **options: Unpack[CompletionOptions]
    ) -> list[Generation]: ...
    @overload
    def completions(self, prompt: Prompt, *, n: int, **options: Unpack[CompletionOptions]) -> list[Generation]: ...
    def completions(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[CompletionOptions]
    ) -> Generation | list[Generation]:
        """Continue a prompt, with OpenAI's `/v1/completions`. Arguments and result as in `generate`."""
        request = requests.completions(prompt, n, options, stream=False)
        return self._generation(request, many=requests.is_many(prompt, n))

    def completions_stream(
        self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[CompletionOptions]
    ) -> Generator[GenerationChunk]:
        """Stream `completions` in chunks. Closing the iterator early cancels the request on the server."""
        return self._stream(requests.completions(prompt, n, options, stream=True))

    @overload
    def chat(self, messages: list[Message], **options: Unpack[ChatOptions]) -> Generation: ...
    @overload
    def chat(self, messages: list[Message], *, n: int, **options: Unpack[ChatOptions]) -> list[Generation]: ...
    def chat(
        self, messages: list[Message], *, n: int | None = None, **options: Unpack[ChatOptions]
    ) -> Generation | list[Generation]:
        """Answer a conversation, with OpenAI's `/v1/chat/completions`. Returns a list if `n` is given."""
        request = requests.chat(messages, n, options, stream=False)
        return self._generation(request, many=n is not None)

    def chat_stream(
        self, messages: list[Message], *, n: int | None = None, **options: Unpack[ChatOptions]
    ) -> Generator[GenerationChunk]:
        """Stream `chat` in chunks. Closing the iterator early cancels the request on the server."""
        return self._stream(requests.chat(messages, n, options, stream=True))

    def register(self, processor: ProcessorLike, name: str | None = None) -> RegisteredProcessor:
        """Upload a processor once; pass the result as `processor=` afterwards, which only sends its digest.

        Tensors and NumPy arrays of 64 KiB or more are uploaded by themselves, as artifacts: once, for all classes that
        use them.

        Another class with the same name becomes the next version; registering the same class again changes nothing.

        Args:
            processor: see `ProcessorLike`.
            name: name to register it by: `processor="<name>"` is its newest version, `"<name>@2"` its second.
                None: the class's name.
        """
        registration = requests.register(processor, name)
        try:
            for artifact in registration.artifacts:
                self._upload(artifact)
        except NotFoundError:  # a server without artifacts
            registration = requests.register(processor, name, artifact_size=None)
        return self._call(self._in_dialect(registration.request), parse_registered)

    def upload_artifact(self, data: Any) -> str:
        """Upload the bytes of a tensor or array, unless the server has them. `register` does so for those of a class.

        Args:
            data: a CPU tensor, a NumPy array, or bytes.

        Returns:
            Its digest. Classes that use an equal tensor refer to it.
        """
        artifact = Artifact.of(raw_bytes(data))
        self._upload(artifact)
        return artifact.digest

    def processors(self) -> list[ProcessorInfo]:
        """List the server's processors: the installed ones, and those registered with this client's API key."""
        return self._call(requests.get("/v1/processors"), parse_processors)

    def processor(self, id: str | RegisteredProcessor) -> ProcessorDetails:
        """Return one of the server's processors with its source.

        Args:
            id: name (the newest version), name and version, digest, or the result of `register`.

        Raises:
            NotFoundError: the server does not have it.
        """
        return self._call(requests.processor(id), parse_processor)

    def delete_processor(self, id: str | RegisteredProcessor) -> list[str]:
        """Delete registered processors. Running requests keep using them.

        Args:
            id: name and version, name (all its versions), digest, or the result of `register`.

        Returns:
            The ids of the deleted processors.

        Raises:
            NotFoundError: the server does not have it.
            PermissionDeniedError: it is installed, not registered.
        """
        return self._call(requests.delete_processor(id), parse_deleted)

    def models(self) -> list[Model]:
        """List the models that the server serves."""
        return self._call(requests.get("/v1/models"), parse_models)

    def model_info(self) -> dict[str, Any]:
        """Return information about the server's model (`/get_model_info`)."""
        return self._call(requests.get("/get_model_info"), dict[str, Any])

    def server_info(self) -> dict[str, Any]:
        """Return information about the server (`/server_info`)."""
        return self._call(requests.get("/server_info"), dict[str, Any])

    def health(self) -> bool:
        """Return whether the server is healthy, for polling while it starts. Tries once; False if it is unreachable."""
        try:
            return self._attempt(requests.get("/health")).is_success
        except TransportError:
            return False

    def abort(self, rid: str) -> None:
        """Cancel the request with this id. SGLang cancels every request whose id starts with it."""
        self._send(requests.abort(rid))

    def abort_all(self) -> None:
        """Cancel every request of this API key. Without keys, and on SGLang, those of all clients."""
        self._send(requests.abort(None))

    def flush_cache(self) -> None:
        """Clear the server's prefix cache, and unload its processors. Refused while requests are running."""
        self._send(requests.flush_cache())

    def _upload(self, artifact: Artifact) -> None:
        try:
            self._send(requests.find_artifact(artifact.digest))
        except NotFoundError:
            self._send(requests.upload_artifact(artifact))

    def _call(self, request: HttpRequest, parse: Callable[[Any], T]) -> T:
        return read_response(self._send(request).content, parse)

    def _generation(self, request: HttpRequest, *, many: bool) -> Generation | list[Generation]:
        request = self._in_dialect(request)
        if request.path == "/generate":
            return self._call(request, partial(parse_generate, many=many))
        return self._call(request, partial(parse_openai, many=many, fault_token=request.fault_token))

    def _stream(self, request: HttpRequest) -> Generator[GenerationChunk]:
        request = self._in_dialect(request)
        sglang = request.path == "/generate"
        reader = StreamReader(SGLangStream() if sglang else OpenAIStream(request.fault_token))
        response = self._send(request)
        try:
            with transport_errors(self._http):
                for piece in response.iter_bytes():
                    yield from reader.feed(piece)
        finally:
            response.close()
        reader.finish()

    def _in_dialect(self, request: HttpRequest) -> HttpRequest:
        """Translate the request into the server's dialect, after detecting it if needed."""
        while (probe := self._dialect.probe_before(request)) is not None:
            try:
                result: bytes | APIStatusError = self._send(probe).content
            except APIStatusError as error:
                result = error
            self._dialect.handle_probe(probe, result)
        return self._dialect.translate(request)

    def _send(self, request: HttpRequest) -> httpx.Response:
        """Send with retries; return a response with a success status, unread if the request streams."""
        attempt = 0
        while True:
            try:
                response = self._attempt(request)
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
            self._sleep(delay)
            attempt += 1

    def _attempt(self, request: HttpRequest) -> httpx.Response:
        with transport_errors(self._http):
            response = self._http.send(http_request(self._http, request), stream=request.stream)
            if not response.is_success:
                response.read()
            return response
