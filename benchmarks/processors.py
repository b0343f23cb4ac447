"""A processor as people ship them."""

from __future__ import annotations

from logitship import CustomLogitProcessor


class BanSome(CustomLogitProcessor):
    """Forbids each request's own tokens."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        """Edit the rows in place."""
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["banned"]] = -float("inf")
        return logits
