"""Failures of running requests, as the errors that clients see."""

from __future__ import annotations

from logitship.client.author_errors import author_line
from logitship.client.errors import ProcessorFault
from logitship.sampler.batch_processors.guarded_processor import BatchProcessorFault
from logitship.server.requests.messages import RequestError

INTERNAL_ERROR = RequestError("InternalServerError", "the engine failed while it ran this request", 500)

STOPPED = RequestError("ServiceUnavailable", "the server was stopped before the answer was complete", 503)


def request_error(fault: Exception) -> RequestError:
    """Return the error of a sequence whose processors or logits are at fault."""
    if isinstance(fault, ProcessorFault):
        line = author_line(fault.traceback)
        message = f"{fault.message} ({line})" if line else fault.message
        status_code = 500 if fault.kind == "internal" else 400
        return RequestError(
            "ProcessorFault", message, status_code, fault.traceback, fault.digest, fault.name, fault.kind
        )
    status_code = 500 if isinstance(fault, BatchProcessorFault) else 400
    return RequestError(type(fault).__name__, str(fault), status_code)
