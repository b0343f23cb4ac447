"""The operator's processors for every request: `--default-processor`.

An entry is `NAME` or `NAME={"parameter": …}` for an installed processor. `NAME=@FILE` is for a class that runs in a
sandbox: the file has its processor string, or `{"processor": <processor string>, "params": {…}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXPECTED = "expected NAME, NAME={…} with parameters in JSON, or NAME=@FILE"


@dataclass(frozen=True)
class DefaultProcessor:
    """A processor of every request, which is neither parsed nor loaded yet.

    Attributes:
        name: the name of an installed processor; of a file's class, a name for messages.
        entry: the same as an entry of a request's `logits_processors`.
        is_shipped: the class is in a file.
    """

    name: str
    entry: Mapping[str, Any]
    is_shipped: bool = False


def read_default_processors(texts: Iterable[str]) -> tuple[DefaultProcessor, ...]:
    """Read entries and their files, in the order in which the processors run.

    Raises:
        ValueError: an entry is malformed, or its file cannot be read.
    """
    return tuple(_read(text) for text in texts)


def _read(text: str) -> DefaultProcessor:
    name, separator, value = (part.strip() for part in text.partition("="))
    if not name or (separator and not value):
        raise ValueError(f"default_processor: {_EXPECTED}, got {text[:80]!r}")
    if value.startswith("@"):
        return DefaultProcessor(name, _entry_of_file(name, value[1:]), is_shipped=True)
    try:
        params = json.loads(value or "{}")
    except ValueError as error:
        raise ValueError(f"default_processor: {name}: {_EXPECTED}: {error}") from None
    if not isinstance(params, dict):
        raise ValueError(f"default_processor: {name}: {_EXPECTED}, got {value[:80]!r}")
    return DefaultProcessor(name, {"processor": {"name": name}, "params": params})


def _entry_of_file(name: str, file: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"default_processor: {name}: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"default_processor: {name}: {file} is not JSON: {error}") from None
    is_entry = isinstance(entry, dict) and "processor" in entry
    # With parameters in any case: else it would get the `custom_params` of requests.
    return {"params": {}, **(entry if is_entry else {"processor": entry})}
