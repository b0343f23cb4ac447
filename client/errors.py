"""Errors that logitship raises to its users.

```
LogitshipError
├── ProcessorError                    a processor string, or the class behind it
│   ├── ProcessorSerializationError   to_str(): something in the class cannot be serialized
│   ├── ProcessorLoadError            the string is malformed, or its class cannot be rebuilt here
│   └── ProcessorFault                the processor ran and broke its contract
├── TransportError                    no usable response: connection refused, broken, timed out; no LLM server
├── APIStatusError                    response with an error status
│   ├── BadRequestError               400, 422
│   ├── AuthenticationError           401
│   ├── PermissionDeniedError         403
│   ├── NotFoundError                 404
│   ├── RequestTooLargeError          413
│   ├── ServerBusyError               429, 503
│   └── InternalServerError           other 5xx
└── GenerationError                   the request was accepted, then ended by an error
```
"""

from __future__ import annotations

from typing import Any

PRINTED = "It printed:"
"""Line before what a processor printed."""

MAX_PROCESSOR_SIZE_FLAG = "--max-processor-size"
"""Flag of the server that limits processor strings."""

LARGE_PROCESSOR_ADVICE = (
    "at logitship's own server, Client.register uploads tensors and arrays once, as artifacts; a tokenizer is in "
    "__req__.tokenizer already"
)
"""Advice for a processor string that is too long."""

_MAX_PRINTED = 2000
"""Most characters of what a processor printed in a fault."""


def with_printed(text: str, printed: str) -> str:
    """Return the text of an error with the last of what the processor printed before it."""
    return "\n".join(filter(None, (text.rstrip("\n"), PRINTED, printed[-_MAX_PRINTED:]))) if printed else text


class LogitshipError(Exception):
    """Base class of all errors raised by logitship."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's would call the class with the message alone, but some classes also need keyword arguments.
        return _without_init, (type(self), self.args), vars(self)


def _without_init(cls: type[LogitshipError], args: tuple[Any, ...]) -> LogitshipError:
    """Create a copy of an error, whose attributes are set afterwards."""
    return cls.__new__(cls, *args)


class ProcessorError(LogitshipError):
    """A processor string, or the class in it, is invalid."""


class ProcessorSerializationError(ProcessorError):
    """The class uses an object that cannot be serialized. The message names it."""


class ProcessorLoadError(ProcessorError):
    """A processor string is malformed, or its class cannot be rebuilt in this process."""


class ProcessorFault(ProcessorError):
    """A processor broke its contract while it ran.

    Attributes:
        digest: identity of the processor, `sha256:…`.
        name: the processor's class name.
        kind: the kind of fault. With or without a sandbox: `exception` (it raised), `bad_result` (it did not return a
            float tensor of the right shape), `non_finite` (its result has NaN, +inf, or a row that is all -inf),
            `uncopyable` (its state of a sequence cannot be copied, as beam search requires), `internal` (the server
            failed on the call, which is not the processor's fault), `too_slow` (inside vLLM and SGLang: its calls made
            other requests wait for longer than the request's allowance). In a sandbox also:
            `deadline` (no response in time), `crash` (its process died: a signal, an exit, the memory limit),
            `cpu_time` (it used the CPU outside its calls), `protocol` (it violated the sandbox protocol), each of
            which ends the sandbox; `load` (it had ended before the request's first step); and `blocked` (the server's
            operator has blocked it).
        traceback: traceback of the processor's own code, or `""` if there is none.
    """

    def __init__(self, message: str, *, digest: str, name: str, kind: str, traceback: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.digest = digest
        self.name = name
        self.kind = kind
        self.traceback = traceback

    def add_printed(self, printed: str) -> None:
        """Add the last of what the processor printed to the traceback."""
        self.traceback = with_printed(self.traceback, printed)


class TransportError(LogitshipError):
    """No usable response: connection refused, broken or timed out, or a response that no LLM server sends."""


class APIStatusError(LogitshipError):
    """The server responded with an error status.

    Attributes:
        status_code: the HTTP status.
        message: the server's error message.
        param: name of the offending field, if the server gives one.
        type: the server's error type, such as `invalid_request_error`.
        body: the decoded body, or its text if it is not JSON.
    """

    def __init__(
        self, message: str, *, status_code: int, param: str | None = None, type: str | None = None, body: Any = None
    ) -> None:
        super().__init__(f"{status_code}: {message}")
        self.status_code = status_code
        self.message = message
        self.param = param
        self.type = type
        self.body = body


class BadRequestError(APIStatusError):
    """400 or 422: the request is malformed."""


class AuthenticationError(APIStatusError):
    """401: the API key is missing or wrong."""


class PermissionDeniedError(APIStatusError):
    """403: the API key does not allow this."""


class NotFoundError(APIStatusError):
    """404: no such model, processor, artifact or route."""


class RequestTooLargeError(APIStatusError):
    """413: the request body is over the server's limit."""


class ServerBusyError(APIStatusError):
    """429 or 503: the queue is full or the server is shutting down. Safe to retry."""


class InternalServerError(APIStatusError):
    """Any other 5xx."""


class GenerationError(LogitshipError):
    """The request was accepted and then ended by an error; `partial` has the output so far.

    Attributes:
        message: the server's error message.
        type: `ProcessorFault`, `AbortError`, or the server's own error type.
        traceback: traceback of the processor's own code, if the server sends one.
        partial: the response up to the error, or None.
    """

    def __init__(self, message: str, *, type: str | None = None, traceback: str = "", partial: Any = None) -> None:
        super().__init__(f"{message}\n{traceback}".rstrip())
        self.message = message
        self.type = type
        self.traceback = traceback
        self.partial = partial


_STATUS_ERRORS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    413: RequestTooLargeError,
    422: BadRequestError,
    429: ServerBusyError,
    503: ServerBusyError,
}


def error_for_status(status_code: int) -> type[APIStatusError]:
    """Return the exception class for an HTTP error status."""
    fallback = InternalServerError if status_code >= 500 else APIStatusError
    return _STATUS_ERRORS.get(status_code, fallback)
