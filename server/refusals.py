"""Errors at startup, and refusals of requests with their HTTP status.

```
StartError                    the message says what is wrong and how to fix it
└── UnsupportedModel          the engine cannot serve this model
RequestRefused
├── BadRequest            400   malformed; names the field
├── Unauthorized          401   API key missing or wrong
├── Forbidden             403   the API key or the allow list does not permit it
├── NotFound              404   no such model, processor, artifact or route
├── RequestTimeout        408   the body took too long to arrive
├── RequestTooLarge       413   body or processor over the size limit
├── UnsupportedMediaType  415   the body is not declared as JSON
├── QueueFull             429   too many waiting requests, or bytes of them: try again later
├── RateLimited           429   the API key has reached a limit per minute
├── ShareExceeded         429   the tenant's processors have used their share of the time
└── ServiceUnavailable    503   shutting down, not ready, or no capacity now
    └── ThreadUnavailable 503   no thread can be started now
```
"""

from __future__ import annotations

SHIPPING_IS_OFF = (
    "The server is not configured to enable custom logit processor. "
    "Please set `--enable-custom-logit-processor` to enable this feature."
)
"""SGLang's message, verbatim: its clients and tests match on it."""


class StartError(Exception):
    """The server cannot start."""


class UnsupportedModel(StartError):
    """The engine does not support a feature of the model. The message names it."""


class RequestRefused(Exception):
    """A request was refused before anything ran.

    Attributes:
        status_code: HTTP status.
        type: OpenAI's error type.
        message: one sentence for the client.
        param: the offending field, by its name in the API that was called.
        retry_after: seconds after which the request may succeed; None: the default of the status.
    """

    status_code = 400
    type = "invalid_request_error"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(RequestRefused):
    """The request is malformed."""


class Unauthorized(RequestRefused):
    """The API key is missing or wrong."""

    status_code = 401
    type = "authentication_error"


class Forbidden(RequestRefused):
    """The API key does not permit this, the processor is not on the allow list, or another site's page asks."""

    status_code = 403
    type = "permission_error"


class NotFound(RequestRefused):
    """No such model, processor, artifact or route."""

    status_code = 404
    type = "not_found_error"


class RequestTimeout(RequestRefused):
    """The body took too long to arrive."""

    status_code = 408
    type = "timeout_error"


class RequestTooLarge(RequestRefused):
    """The body, or the processor in it, is over the size limit."""

    status_code = 413


class UnsupportedMediaType(RequestRefused):
    """The body is not declared as JSON."""

    status_code = 415


class QueueFull(RequestRefused):
    """Too many requests, or bytes of requests, are waiting."""

    status_code = 429
    type = "rate_limit_error"


class ShareExceeded(RequestRefused):
    """The tenant's shipped processors have used more than their share of the time.

    Args:
        retry_after: seconds after which to try again.
    """

    status_code = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(RequestRefused):
    """The caller has reached a limit per minute.

    Attributes:
        what: the limit: `requests` or `processor_loads`.
    """

    status_code = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, what: str, retry_after: int) -> None:
        super().__init__(message)
        self.what = what
        self.retry_after = retry_after


class ServiceUnavailable(RequestRefused):
    """The server is shutting down or not ready, or has no capacity now: for a processor, a sandbox or a grammar."""

    status_code = 503
    type = "service_unavailable_error"


class ThreadUnavailable(ServiceUnavailable, RuntimeError):
    """No thread can be started for the request now. A `RuntimeError`, as `Thread.start` raises one."""

    def __init__(self) -> None:
        super().__init__("the server cannot start a thread for this request now: try again later")
