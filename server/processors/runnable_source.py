"""The source of a registered class, as a module that runs where logitship's client is installed."""

from __future__ import annotations

import re

from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.client.serialization.shipped_names import SGLANG_MODULE

_FUTURE = "from __future__ import annotations\n"
_VALUES = """
import dill

# The values of the author's module that have no literal form.
globals().update(dill.loads(bytes.fromhex({captured!r})))
"""
_VALUES_WITH_ARTIFACTS = """
import io
import pathlib

import dill

# The tensors and arrays of the author's module. Others are artifacts, read from files named as their digests.
_ARTIFACTS = {{
{shared}}}


class _Values(dill.Unpickler):
    def persistent_load(self, digest):
        found = _ARTIFACTS.get(digest)
        return bytearray(pathlib.Path(digest).read_bytes() if found is None else bytes.fromhex(found))


globals().update(_Values(io.BytesIO(bytes.fromhex({captured!r})), ignore=True).load())
"""
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
    return f"{_FUTURE}{_values(source)}{text.removeprefix(_FUTURE)}"


def uploaded_artifacts(source: SourceProcessor) -> list[str]:
    """Return the digests of the artifacts that the text of `runnable_text` reads from files."""
    return [each.digest for each in source.artifacts if each.content is None]


def _values(source: SourceProcessor) -> str:
    """Return the statements that recreate the values of the author's module that have no literal form."""
    if not source.artifacts:
        return _VALUES.format(captured=source.captured.hex())
    shared = {each.digest: each.content.data.hex() for each in source.artifacts if each.content is not None}
    lines = "".join(f"    {digest!r}: {data!r},\n" for digest, data in shared.items())
    return _VALUES_WITH_ARTIFACTS.format(captured=source.captured.hex(), shared=lines)


def _our_import(match: re.Match[str]) -> str:
    """Return the import of our class instead of SGLang's of the same name."""
    name, alias = match.groups()
    cls = SGLANG_NAMES.get((SGLANG_MODULE, name))
    if cls is None:
        return match[0]
    module = "logitship" if cls is CustomLogitProcessor else cls.__module__
    return f"from {module} import {name}" + (f" as {alias}" if alias else "")
