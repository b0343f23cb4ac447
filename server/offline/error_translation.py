"""The engine's refusals and failures as exceptions for the code that called `LLM` or `AsyncLLM`."""

from __future__ import annotations

from typing import Any

from logitship.client.errors import GenerationError, LogitshipError, ProcessorFault
from logitship.server.refusals import RequestRefused, ServiceUnavailable
from logitship.server.requests.messages import RequestError


class InvalidRequest(ValueError):
    """A prompt, a sampling parameter or a processor was refused: nothing of its request ran.

    Attributes:
        message: one sentence, which begins with the field's name.
        param: the offending argument or field; None where an installed batch processor refused.
    """

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def error_of_refusal(refused: RequestRefused) -> Exception:
    """The exception for a request that was not admitted."""
    if isinstance(refused, ServiceUnavailable):
        return RuntimeError(refused.message)
    return InvalidRequest(refused.message, param=refused.param)


def error_of_failure(error: RequestError, partial: Any) -> LogitshipError:
    """The exception for a request that was ended by an error.

    Args:
        error: what the engine says.
        partial: the output up to there.
    """
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
        # The raising happened on the engine's thread: without this the author would not see the line in the code.
        fault.add_note(f"The processor's own traceback:\n{error.traceback}")
    return fault
