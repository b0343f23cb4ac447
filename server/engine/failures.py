"""Failures of running requests, as the errors that clients see."""

from __future__ import annotations

from logitship.client.author_errors import author_line
from logitship.client.errors import ProcessorFault
from logitship.sampler.batch_processors.guarded_processor import BatchProcessorFault
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.sandbox.sandbox_executor import BLOCKED
from logitship.server.requests.messages import RequestError

INTERNAL_ERROR = RequestError("InternalServerError", "the engine failed while it ran this request", 500)

STOPPED = RequestError("ServiceUnavailable", "the server was stopped before the answer was complete", 503)


_STATUS_OF_KIND = {"internal": 500, BLOCKED: 403}


def blocked_error(processor: LoadedProcessor) -> RequestError:
    """Return the error of a sequence with a processor that the operator has blocked."""
    message = f"processor {processor.name} was blocked by the server's operator"
    return request_error(ProcessorFault(message, digest=processor.digest, name=processor.name, kind=BLOCKED))


def request_error(fault: Exception) -> RequestError:
    """Return the error of a sequence whose processors or logits are at fault."""
    if isinstance(fault, ProcessorFault):
        line = author_line(fault.traceback)
        message = f"{fault.message} ({line})" if line else fault.message
        status_code = _STATUS_OF_KIND.get(fault.kind, 400)
        return RequestError(
            "ProcessorFault", message, status_code, fault.traceback, fault.digest, fault.name, fault.kind
        )
    status_code = 500 if isinstance(fault, BatchProcessorFault) else 400
    return RequestError(type(fault).__name__, str(fault), status_code)
