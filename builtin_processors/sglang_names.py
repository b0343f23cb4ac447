"""SGLang's built-in processors, recognized by reference.

A processor string of one of SGLang's built-in classes holds no code: its pickle only contains the names of the module
and the class. So it is resolved to an installed processor, without unpickling and without the operator's permission to
run shipped code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.shipped_names import SGLANG_MODULE

from .base import BuiltinProcessor
from .registry import BUILTIN_PROCESSORS
from .thinking_budget import ThinkingBudgetLogitProcessor

INSTALLED_BY_REFERENCE: Mapping[tuple[str, str] | None, type[BuiltinProcessor]] = MappingProxyType(
    {
        (SGLANG_MODULE, processor.__name__): processor
        for processor in BUILTIN_PROCESSORS
        if vars(processor).get("_pickles_as") == (SGLANG_MODULE, processor.__name__)
    }
)
"""`PickledProcessor.reference` of one of SGLang's classes -> the installed class of that name.

Without SGLang's two base classes, which do nothing on their own.
"""
_CLASSES: tuple[type, ...] = (CustomLogitProcessor, ThinkingBudgetLogitProcessor, *INSTALLED_BY_REFERENCE.values())
SGLANG_NAMES: Mapping[tuple[str, str], type] = MappingProxyType(
    {(SGLANG_MODULE, processor.__name__): processor for processor in _CLASSES}
)
"""(module, class name) in SGLang -> our class of that name. Shipped classes may refer to these."""
SGLANG_NAMES_REFERENCE = f"{__name__}:SGLANG_NAMES"
"""`module:attribute` under which a sandbox's process imports `SGLANG_NAMES`."""
