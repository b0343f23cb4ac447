"""Shipped processors in `generate()` of Hugging Face transformers."""

from .generate_seat import ShippedLogitsProcessor

__all__ = ["ShippedLogitsProcessor"]
