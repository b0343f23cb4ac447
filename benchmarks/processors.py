"""A typical shipped processor, as a class and as source code."""

from __future__ import annotations

from logitship import CustomLogitProcessor

SOURCE = """
from logitship import CustomLogitProcessor
class BanSome(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["banned"]] = -float("inf")
        return logits
"""


class BanSome(CustomLogitProcessor):
    """Forbids each request's own tokens."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        """Edit the rows in place."""
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["banned"]] = -float("inf")
        return logits
