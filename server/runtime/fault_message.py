"""The text of a fault, for engines that pass on nothing but a message, and for their logs."""

from __future__ import annotations

from logitship.client.errors import ProcessorFault
from logitship.client.serialization.processor_string import InstalledProcessor

from .tracked_request import TrackedRequest

FAULT_TYPE = "ProcessorFault"


def fault_message(fault: ProcessorFault) -> str:
    """Return the message for the client, which begins with the type and ends with the processor's traceback."""
    message = f"{FAULT_TYPE}: {fault.message}"
    return f"{message}\n{fault.traceback}" if fault.traceback else message


def fault_details(request: TrackedRequest) -> str:
    """Return the tenant of a request that ends, and the digest of its processor, in brackets; "" if it has neither."""
    digests = [each.string.digest for each in request.requested if not isinstance(each.string, InstalledProcessor)]
    if request.fault is not None and request.fault.digest:
        digests = [request.fault.digest]
    details = [f"tenant {request.tenant}"] * bool(request.tenant) + [f"processor {digest}" for digest in digests]
    return f" ({', '.join(details)})" if details else ""
