"""SGLang's own processors, recognised by reference.

A string that SGLang makes of one of its built-in classes holds no code: its pickle is the module's and the class's
name. Such a string asks for an installed processor, so it needs neither unpickling nor the operator's permission to
run shipped code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.shipped_names import SGLANG_MODULE

from .base import BuiltinProcessor
from .registry import BUILTIN_PROCESSORS
from .thinking_budget import ThinkingBudgetLogitProcessor

_INSTALLED: Mapping[str, type[BuiltinProcessor]] = {
    processor.__name__: processor
    for processor in BUILTIN_PROCESSORS
    if vars(processor).get("_pickles_as") == (SGLANG_MODULE, processor.__name__)
}
_CLASSES: tuple[type, ...] = (CustomLogitProcessor, ThinkingBudgetLogitProcessor, *_INSTALLED.values())
SGLANG_NAMES: Mapping[tuple[str, str], type] = MappingProxyType(
    {(SGLANG_MODULE, processor.__name__): processor for processor in _CLASSES}
)
"""(module, class name) in SGLang -> our class of that name: what a shipped class may refer to."""
SGLANG_NAMES_REFERENCE = f"{__name__}:SGLANG_NAMES"
"""`module:attribute` under which a sandbox's process imports `SGLANG_NAMES`."""

# The whole of a pickle that is one global reference. Written out, because `pickletools` reads what a pickle declares:
# ten bytes that announce a bytearray of 8 GiB make it allocate 8 GiB.
_BY_STACK_GLOBAL = re.compile(  # protocols 4 and 5: (length, module), (length, name)
    rb"\x80[\x04\x05] (?:\x95.{8})?"  # PROTO, FRAME
    rb"\x8c(.)([\w.]+)\x94? \x8c(.)(\w+)\x94?"  # SHORT_BINUNICODE, MEMOIZE; twice
    rb"\x93\x94?\.",  # STACK_GLOBAL, MEMOIZE, STOP
    re.DOTALL | re.VERBOSE,
)
_BY_GLOBAL = re.compile(  # protocols 0 to 3: module, name
    rb"(?:\x80[\x02\x03])? c([\w.]+)\n(\w+)\n (?:q.|p\d+\n)?\.",  # PROTO, GLOBAL, BINPUT or PUT, STOP
    re.DOTALL | re.VERBOSE,
)


def installed_by_reference(payload: bytes) -> type[BuiltinProcessor] | None:
    """The installed class that a pickle asks for by SGLang's name and does nothing else. Unpickles nothing.

    SGLang's two base classes are not installed: they do nothing on their own.

    Args:
        payload: the bytes behind a processor string's `callable`; anything at all.
    """
    if match := _BY_STACK_GLOBAL.fullmatch(payload):
        module_length, module, name_length, name = match.groups()
        if module_length[0] != len(module) or name_length[0] != len(name):
            return None
    elif match := _BY_GLOBAL.fullmatch(payload):
        module, name = match.groups()
    else:
        return None
    return _INSTALLED.get(name.decode("ascii")) if module.decode("ascii") == SGLANG_MODULE else None
