"""Errors of the server on what a client or a processor sent, as faults of the requests that they are about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from logitship.client.errors import ProcessorFault

if TYPE_CHECKING:
    from .executor import LoadedProcessor

T = TypeVar("T")

logger = logging.getLogger(__name__)


def attempt(processor: LoadedProcessor, function: Callable[[], T]) -> T | ProcessorFault:
    """Call a function that uses what a client or a processor sent.

    Returns:
        Its result; a fault of the kind `internal` if it raises, which is logged.
    """
    try:
        return function()
    # Whatever it raises, the rows of other processors go on.
    except Exception as error:  # noqa: BLE001  # boundary: engine thread
        return internal_fault(processor.name, processor.digest, error)


def internal_fault(name: str, digest: str, error: Exception) -> ProcessorFault:
    """Log an exception that the server raised on a call of a processor. Return the fault of the call's rows."""
    logger.error("the server failed on a call of processor %s (%s)", name, digest, exc_info=error)
    message = f"the server failed on a call of processor {name}: its log has the details"
    return ProcessorFault(message, digest=digest, name=name, kind="internal")
