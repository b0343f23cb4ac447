"""Receipts as JSON objects, the same on all routes."""

from __future__ import annotations

from collections.abc import Iterable

from logitship.client.records import Receipt
from logitship.server.schemas.answer_schemas import ReceiptAnswer


def receipt_objects(receipts: Iterable[Receipt]) -> list[ReceiptAnswer]:
    """Build one object per receipt."""
    return [
        {
            "digest": receipt.digest,
            "name": receipt.name,
            "steps": receipt.steps,
            "milliseconds": receipt.milliseconds,
        }
        for receipt in receipts
    ]
