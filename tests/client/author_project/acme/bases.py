from __future__ import annotations

from typing import Any

import torch

from logitship import CustomLogitProcessor

REGISTRY: dict[str, str] = {}


class Adding(CustomLogitProcessor):
    """Adds `amount()`. Its subclasses are registered and must declare their unit."""

    unit: str

    def __init_subclass__(cls, *, unit: str) -> None:
        super().__init_subclass__()
        cls.unit = unit
        REGISTRY[cls.__name__] = unit

    def amount(self) -> float:
        return 1.0

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits + self.amount()
