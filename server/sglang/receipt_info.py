"""Receipts in `meta_info`, which SGLang's scheduler sends as `customized_info` of finished requests."""

from __future__ import annotations

from typing import Any

from logitship.server.schemas.response_schemas import ReceiptObject, receipt_objects

from .sglang_seat import find_scheduled


def send_receipts() -> None:
    """Let SGLang's scheduler ask for additional information about the requests that it sends to the front end."""
    from sglang.srt.managers.scheduler_components.output_streamer import (  # pyright: ignore[reportMissingImports]
        SchedulerOutputStreamer,
    )

    SchedulerOutputStreamer.has_additional_customized_info = True


def receipts_of(req: Any) -> list[ReceiptObject]:
    """Return the receipts of a request that has finished; empty for all others.

    Args:
        req: SGLang's `Req`.
    """
    request = find_scheduled(req)
    if request is None or not request.uses or not req.finished():
        return []
    return receipt_objects(use.receipt for use in request.uses)
