"""The source of a registered class, as a module that runs where logitship's client is installed."""

from __future__ import annotations

import re

from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.client.serialization.shipped_names import SGLANG_MODULE

_FUTURE = "from __future__ import annotations\n"
_IMPORT = re.compile(rf"^from {re.escape(SGLANG_MODULE)} import (\w+)(?: as (\w+))?$", re.MULTILINE)


def runnable_text(source: SourceProcessor) -> str:
    """Return the text of a module that defines the class, with the values that were captured with it.

    Running it unpickles these values. Nothing is unpickled here.

    Args:
        source: source that `to_str()` captured, or that a client wrote, which is returned unchanged.
    """
    if not source.captured and source.python is None:
        return source.source
    text = _IMPORT.sub(_our_import, source.source)
    if not source.captured:
        return text
    values = (
        "import dill\n\n"
        "# The values of the author's module that have no literal form.\n"
        f"globals().update(dill.loads(bytes.fromhex({source.captured.hex()!r})))\n"
    )
    return f"{_FUTURE}\n{values}{text.removeprefix(_FUTURE)}"


def _our_import(match: re.Match[str]) -> str:
    """Return the import of our class instead of SGLang's of the same name."""
    name, alias = match.groups()
    cls = SGLANG_NAMES.get((SGLANG_MODULE, name))
    if cls is None:
        return match[0]
    module = "logitship" if cls is CustomLogitProcessor else cls.__module__
    return f"from {module} import {name}" + (f" as {alias}" if alias else "")
