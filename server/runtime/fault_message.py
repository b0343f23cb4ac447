"""The text of a fault, for engines that pass on nothing but a message."""

from __future__ import annotations

from logitship.client.errors import ProcessorFault

FAULT_TYPE = "ProcessorFault"


def fault_message(fault: ProcessorFault) -> str:
    """Return the message for the client, which begins with the type and ends with the processor's traceback."""
    message = f"{FAULT_TYPE}: {fault.message}"
    return f"{message}\n{fault.traceback}" if fault.traceback else message
