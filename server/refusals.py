"""Why the server does not start, and its refusals, each with the HTTP status that it is answered with.

```
StartError                    the message says what is in the way, and what to do
└── UnsupportedModel          the engine cannot serve this model
RequestRefused
├── BadRequest            400   malformed; names the field
├── Unauthorized          401   API key missing or wrong
├── Forbidden             403   not with this API key, or not this processor
├── NotFound              404   no such model or processor
├── RequestTooLarge       413   body or processor over the size limit
├── QueueFull             429   try again later
└── ServiceUnavailable    503   shutting down, or no room for another processor
```
"""

from __future__ import annotations

SHIPPING_IS_OFF = (
    "The server is not configured to enable custom logit processor. "
    "Please set `--enable-custom-logit-processor` to enable this feature."
)
"""SGLang's sentence: clients and tests of it look for these words."""


class StartError(Exception):
    """The server cannot start."""


class UnsupportedModel(StartError):
    """The model has something that the engine cannot serve. The message names it."""


class RequestRefused(Exception):
    """A request was not admitted: nothing ran.

    Attributes:
        status_code: HTTP status.
        type: error type, in OpenAI's spelling.
        message: one sentence for the client.
        param: the offending field, in the words of the API that was called.
    """

    status_code = 400
    type = "invalid_request_error"

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
    """The API key does not allow this, or the operator does not allow this processor."""

    status_code = 403
    type = "permission_error"


class NotFound(RequestRefused):
    """No such model, processor or route."""

    status_code = 404
    type = "not_found_error"


class RequestTooLarge(RequestRefused):
    """The body, or the processor in it, is over the size limit."""

    status_code = 413


class QueueFull(RequestRefused):
    """Too many requests are waiting."""

    status_code = 429
    type = "rate_limit_error"


class ServiceUnavailable(RequestRefused):
    """The server is shutting down, or cannot hold another processor now."""

    status_code = 503
    type = "service_unavailable_error"
