"""Processors in an imported module: plain dill would pickle them by name."""

from __future__ import annotations

import os.path
import xml.etree.ElementTree
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from . import numbers
from .bases import REGISTRY, Adding
from .numbers import SCALE as FACTOR
from .numbers import bias

if TYPE_CHECKING:
    from collections.abc import Sequence

Params = list[dict[str, Any]] | None


class Imported(Adding, unit="logit"):
    """Uses names imported from another module of the package."""

    def amount(self) -> float:
        return FACTOR + len(self.unit) + len(REGISTRY.get("Imported", ""))

    def __call__(self, logits: torch.Tensor, custom_param_list: Params = None) -> torch.Tensor:
        return super().__call__(logits) + bias(logits.shape[-1])


class ModuleAttributes(Adding, unit="logit"):
    """Uses another module of the package as an object: the counter must be shared with its functions."""

    def amount(self) -> float:
        return numbers.scaled(1.0) + numbers.scaled(1.0) + numbers.calls + numbers.SCALE


class Submodules(Adding, unit="logit"):
    """Uses submodules of installed packages."""

    def amount(self) -> float:
        tree = xml.etree.ElementTree.fromstring("<a x='2'/>")
        return float(tree.get("x", "0")) + len(os.path.join("a", "b")) + float(F.relu(torch.tensor(-1.0)))


class TypeCheckingNames(Adding, unit="logit"):
    """Has annotations with names that are never imported."""

    def total(self, values: Sequence[float]) -> float:
        return sum(values)

    def amount(self) -> float:
        return self.total([1.5, 2.5])
