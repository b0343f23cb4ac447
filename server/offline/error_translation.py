"""Exceptions of `LLM` and `AsyncLLM`, made from the engine's refusals and failures."""

from __future__ import annotations

from typing import Any

from logitship.client.errors import GenerationError, ProcessorFault
from logitship.server.engine.failures import STOPPED
from logitship.server.refusals import RequestRefused, ServiceUnavailable
from logitship.server.requests.messages import RequestError


class InvalidRequest(ValueError):
    """A prompt, a sampling parameter or a processor was refused. The request did not start.

    Attributes:
        message: one sentence that starts with the name of the field.
        param: the invalid argument or field; None if an installed batch processor refused the request.
    """

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def error_of_refusal(refused: RequestRefused) -> Exception:
    """Return the exception for a request that was not admitted."""
    if isinstance(refused, ServiceUnavailable):
        return RuntimeError(refused.message)
    return InvalidRequest(refused.message, param=refused.param)


def error_of_failure(error: RequestError, partial: Any) -> Exception:
    """Return the exception for a request that ended with an error.

    Once an engine is stopped, a request ends with an error, is refused or is cancelled, depending on how far it got:
    callers see a `RuntimeError` for each of them.

    Args:
        error: the engine's error.
        partial: the output before the error.
    """
    if error == STOPPED:
        return RuntimeError("this object was shut down while the request ran")
    if error.digest is None:
        return GenerationError(error.message, type=error.type, traceback=error.traceback, partial=partial)
    fault = ProcessorFault(
        error.message,
        digest=error.digest,
        name=error.name or "",
        kind=error.kind or "exception",
        traceback=error.traceback,
    )
    if error.traceback:
        # The exception was raised on the engine's thread: without this note its traceback would not be shown.
        fault.add_note(f"The processor's own traceback:\n{error.traceback}")
    return fault
