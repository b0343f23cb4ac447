"""SGLang's built-in processors, recognized by reference.

A processor string of one of SGLang's built-in classes holds no code: its pickle only contains the names of the module
and the class. So it is resolved to an installed processor, without unpickling and without the operator's permission to
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
"""(module, class name) in SGLang -> our class of that name. Shipped classes may refer to these."""
SGLANG_NAMES_REFERENCE = f"{__name__}:SGLANG_NAMES"
"""`module:attribute` under which a sandbox's process imports `SGLANG_NAMES`."""

# A pickle that consists of one global reference. A regular expression, because `pickletools` is unsafe: ten bytes that
# declare a bytearray of 8 GiB make it allocate 8 GiB.
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
    """Return the installed class if a pickle consists of a reference to SGLang's class of that name. Never unpickles.

    SGLang's two base classes are not installed, because they do nothing on their own.

    Args:
        payload: the bytes of a processor string's `callable`; not trusted.
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
