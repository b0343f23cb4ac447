"""The processor string: parsed and written without running anything.

A processor string is JSON text in one of four forms:

```
{"callable": "<hex>", "logitship": {…}}          pickled: SGLang's form, ours adds the second key
{"source": "<python>", "class_name": "Name"}     source: no pickle at all
{"digest": "sha256:…"}                           registered: uploaded earlier
{"name": "disallowed_tokens"}                    installed by the operator; ships no code.
                                                 Also the name of a registered one: "Lipogram", "Lipogram@2"
```
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import orjson

from logitship.client.errors import ProcessorLoadError

from .artifact import Artifact

FORMAT_VERSION = 1
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Bytecode of a pickled class only runs on the Python minor version that made it."""

_RANGE = re.compile(r"([^\n]{1,200}):([1-9]\d{0,6}):([1-9]\d{0,6}):([1-9]\d{0,6})")
_MAX_RANGES = 1000
_PART = re.compile(r"(\d{1,10}):(\d{1,10})")
MAX_ARTIFACTS = 100
"""Most artifacts of a processor."""

DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")

# A pickle that consists of one global reference. Regular expressions, because `pickletools` is unsafe: ten bytes that
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


def _digest(*parts: bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return f"sha256:{sha.hexdigest()}"


def source_lines(source: str) -> list[str]:
    """Split a source into lines, each with a newline at its end, as Python numbers them.

    Unlike `str.splitlines`, which also splits at form feeds and U+2028.
    """
    return list(io.StringIO(source, newline=None))


@dataclass(frozen=True)
class LineRange:
    """Lines of a `Listing` that are also those of a file of the author.

    Attributes:
        filename: name of the file, without its folder.
        first: number of the first line in the file.
        listed: number of the same line in the listing.
        count: number of lines.
    """

    filename: str
    first: int
    listed: int
    count: int


@dataclass(frozen=True)
class Listing:
    """Lines of the author's files, for tracebacks of a pickled class. They describe its code, and never run.

    Attributes:
        text: the lines.
        ranges: where they are from.
    """

    text: str
    ranges: tuple[LineRange, ...]

    @cached_property
    def _lines(self) -> list[str]:
        return source_lines(self.text)

    def line(self, filename: str, number: int) -> str:
        """Return a line of a file, without its indentation; "" if it is not listed, or not sure."""
        found = {
            self._lines[index]
            for each in self.ranges
            if each.filename == filename
            and each.first <= number < each.first + each.count
            and (index := each.listed + number - each.first - 1) < len(self._lines)
        }
        return found.pop().strip() if len(found) == 1 else ""  # two files may have the same name


@dataclass(frozen=True)
class SourceProcessor:
    """A class as source text.

    Attributes:
        source: text of a Python module that defines the class and everything it uses.
        class_name: name of the processor class in it.
        captured: dill pickle of a dict of the module's values that have no literal form, or b"".
        python: minor version that made `captured`, such as "3.11"; None if unknown.
        artifacts: the bytes that `captured` refers to.
    """

    source: str
    class_name: str
    captured: bytes = b""
    python: str | None = None
    artifacts: tuple[Artifact, ...] = ()

    @cached_property
    def digest(self) -> str:
        """`sha256:` of everything that determines the code."""
        return _digest(b"source", self.source.encode(), self.class_name.encode(), self.captured)


@dataclass(frozen=True)
class PickledProcessor:
    """A class as a dill pickle.

    Attributes:
        payload: output of `dill.dumps(cls)`.
        python: minor version that made it, such as "3.11"; None if the string does not say (SGLang's do not).
        dill: version of dill that made it, or None.
        source: the same class as source, for a Python that cannot run the pickle; None if there is none.
        params_schema: JSON schema of its parameters, or None.
        name: the class's name as the string claims it, or None.
        listing: its lines for tracebacks, or None.
        artifacts: the bytes that `payload` refers to. A stock SGLang server only reads strings without.
    """

    payload: bytes
    python: str | None = None
    dill: str | None = None
    source: SourceProcessor | None = None
    params_schema: dict[str, Any] | None = None
    name: str | None = None
    listing: Listing | None = None
    artifacts: tuple[Artifact, ...] = ()

    @cached_property
    def digest(self) -> str:
        """`sha256:` of the pickle alone: the rest of the string is only a description."""
        return f"sha256:{hashlib.sha256(self.payload).hexdigest()}"

    @property
    def reference(self) -> tuple[str, str] | None:
        """(module, class name) if the pickle only refers to a class, and contains no code; None if it contains more."""
        if match := _BY_STACK_GLOBAL.fullmatch(self.payload):
            module_length, module, name_length, name = match.groups()
            if module_length[0] != len(module) or name_length[0] != len(name):
                return None
        elif match := _BY_GLOBAL.fullmatch(self.payload):
            module, name = match.groups()
        else:
            return None
        return module.decode("ascii"), name.decode("ascii")

    @property
    def runnable(self) -> PickledProcessor | SourceProcessor:
        """The form that runs on this Python: the pickle, or the source if another minor version made the pickle.

        Its digest is the identity of the processor. The two have different digests, because the pickle and the source
        of a string need not agree.

        Raises:
            ProcessorLoadError: the pickle is another version's and there is no source.
        """
        if self.python is None or self.python == PYTHON:
            return self
        if self.source is not None:
            return self.source
        raise ProcessorLoadError(
            f"the processor was serialized by Python {self.python}, this server runs Python {PYTHON}, and the string "
            "contains no source to rebuild it from: serialize it with the server's Python version, or send the class "
            "in source form"
        )


@dataclass(frozen=True)
class RegisteredProcessor:
    """A processor that was uploaded earlier, by its digest.

    Attributes:
        id: its name and version, such as `Lipogram@2`, if it comes from a response of the server.
    """

    digest: str
    id: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class InstalledProcessor:
    """A processor that the operator installed, by name or as `module:Class`; or a registered one, by its name."""

    name: str


ProcessorString: TypeAlias = SourceProcessor | PickledProcessor | RegisteredProcessor | InstalledProcessor


def parse(text: str | bytes) -> ProcessorString:
    """Parse a processor string. Runs nothing, unpickles nothing.

    Raises:
        ProcessorLoadError: not one of the four forms; the message says what is wrong.
    """
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ProcessorLoadError(f"the processor string is not JSON: {error}") from None
    return from_json(data)


def from_json(data: Any) -> ProcessorString:
    """Parse a processor string that is already decoded from JSON."""
    if not isinstance(data, dict):
        raise ProcessorLoadError("the processor string is not a JSON object")
    if "callable" in data:
        return _pickled(data)
    if "source" in data:
        _only(data, "source", "class_name")
        return SourceProcessor(_text(data, "source"), _text(data, "class_name"))
    if "digest" in data:
        _only(data, "digest")
        digest = _text(data, "digest")
        if not DIGEST_PATTERN.fullmatch(digest):
            raise ProcessorLoadError(f"'digest' is not 'sha256:' and 64 hexadecimal digits: {digest[:80]!r}")
        return RegisteredProcessor(digest)
    if "name" in data:
        _only(data, "name")
        return InstalledProcessor(_text(data, "name"))
    raise ProcessorLoadError("the processor string has none of the keys 'callable', 'source', 'digest' and 'name'")


def _pickled(data: dict[str, Any]) -> PickledProcessor:
    _only(data, "callable", "logitship")
    payload = _hex(data, "callable")
    if not payload:
        raise ProcessorLoadError("'callable' is empty")
    about = data.get("logitship")
    if about is None:
        return PickledProcessor(payload)
    if not isinstance(about, dict):
        raise ProcessorLoadError("'logitship' is not a JSON object")
    version = about.get("v")
    if version != FORMAT_VERSION:
        shown = repr(version)[:80] if isinstance(version, str | int | float | None) else type(version).__name__
        raise ProcessorLoadError(f"'logitship.v' is {shown}: this version reads {FORMAT_VERSION}")
    python = _text(about, "python") if about.get("python") is not None else None
    name = _text(about, "name") if about.get("name") is not None else None
    source, artifacts = None, _artifacts(about)
    if about.get("source") is not None:
        captured = _hex(about, "captured") if about.get("captured") is not None else b""
        used = (*_shared(about, payload), *artifacts)
        source = SourceProcessor(_text(about, "source"), _text(about, "name"), captured, python, used)
    schema = about.get("params_schema")
    if schema is not None and not isinstance(schema, dict):
        raise ProcessorLoadError("'logitship.params_schema' is not a JSON object")
    return PickledProcessor(payload, python, about.get("dill"), source, schema, name, _listing(about), artifacts)


def _artifacts(about: dict[str, Any]) -> tuple[Artifact, ...]:
    """Read the digests of the artifacts that the pickle refers to."""
    digests = about.get("artifacts")
    if digests is None:
        return ()
    if not isinstance(digests, list) or len(digests) > MAX_ARTIFACTS:
        raise ProcessorLoadError(f"'logitship.artifacts' is not a list of at most {MAX_ARTIFACTS} digests")
    for digest in digests:
        if not isinstance(digest, str) or not DIGEST_PATTERN.fullmatch(digest):
            raise ProcessorLoadError(
                "'logitship.artifacts' has an entry that is not 'sha256:' and 64 hexadecimal digits"
            )
    return tuple(map(Artifact, dict.fromkeys(digests)))


def _shared(about: dict[str, Any], payload: bytes) -> Iterator[Artifact]:
    """Read the parts of the pickle that `captured` refers to: offsets and lengths."""
    if about.get("shared") is None:
        return
    parts = _text(about, "shared").split(" ", MAX_ARTIFACTS)
    if len(parts) > MAX_ARTIFACTS:
        raise ProcessorLoadError(f"'logitship.shared' has more than {MAX_ARTIFACTS} parts")
    left = len(payload)  # else each part could be all of it
    for part in parts:
        match = _PART.fullmatch(part)
        if match is None:
            raise ProcessorLoadError("'logitship.shared' is not a text of offsets and lengths such as '120:4000'")
        offset, length = map(int, match.groups())
        left -= length
        if left < 0:
            raise ProcessorLoadError("'logitship.shared' has more bytes than 'callable'")
        yield Artifact.of(payload[offset : offset + length])


def _listing(about: dict[str, Any]) -> Listing | None:
    """Read the lines for tracebacks: `lines` has ranges `file:first:listed:count` of `listing`, or else of `source`."""
    ranges, text = about.get("lines"), about.get("listing", about.get("source"))
    if ranges is None:
        return None
    found = [_RANGE.fullmatch(each) for each in _text(about, "lines").split("\n")]
    if not isinstance(text, str) or len(found) > _MAX_RANGES or None in found:
        raise ProcessorLoadError("'logitship.lines' has no ranges of lines of 'listing' or 'source'")
    return Listing(text, tuple(LineRange(each[1], *map(int, each.groups()[1:])) for each in found if each))


def _only(data: dict[str, Any], *known: str) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ProcessorLoadError(f"the processor string has unknown keys next to {known[0]!r}: {unknown}")


def _text(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise ProcessorLoadError(f"{key!r} is missing, empty or not a string")
    return value


def _hex(data: dict[str, Any], key: str) -> bytes:
    value = data[key]
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise ProcessorLoadError(f"{key!r} is not a string of hexadecimal digits") from None


def to_text(string: ProcessorString) -> str:
    """Write a processor string. `parse` reads the same code from it, and a `params_schema` as it is in JSON.

    Raises:
        ValueError: a source form with captured values, which the wire format lacks.
    """
    return orjson.dumps(to_json(string)).decode()


def to_json(string: ProcessorString) -> dict[str, Any]:
    """Return the processor string as a JSON object that is not encoded yet."""
    match string:
        case PickledProcessor():
            return _pickled_json(string)
        case SourceProcessor():
            if string.captured:
                raise ValueError("the source form cannot contain captured values: send the pickled form")
            return {"source": string.source, "class_name": string.class_name}
        case RegisteredProcessor():
            return {"digest": string.digest}
        case InstalledProcessor():
            return {"name": string.name}


def _pickled_json(string: PickledProcessor) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": string.name,
        "python": string.python,
        "dill": string.dill,
        "params_schema": string.params_schema,
    }
    if string.source is not None:
        about["source"] = string.source.source
        about["name"] = string.source.class_name
        about["captured"] = string.source.captured.hex() or None
        about["shared"] = " ".join(_shared_parts(string, string.source)) or None
    if string.listing is not None and (ranges := [each for each in map(_range_text, string.listing.ranges) if each]):
        about["lines"] = "\n".join(ranges[:_MAX_RANGES])
        if string.source is None or string.source.source != string.listing.text:
            about["listing"] = string.listing.text
    about["artifacts"] = [each.digest for each in string.artifacts] or None
    about = {key: value for key, value in about.items() if value is not None}
    data: dict[str, Any] = {"callable": string.payload.hex()}
    if about:
        data["logitship"] = {"v": FORMAT_VERSION, **about}
    return data


def _range_text(lines: LineRange) -> str:
    """Return a range of lines as text; "" if its form has no place for it."""
    text = f"{lines.filename}:{lines.first}:{lines.listed}:{lines.count}"
    return text if _RANGE.fullmatch(text) else ""


def _shared_parts(string: PickledProcessor, source: SourceProcessor) -> Iterator[str]:
    """Yield the offsets and lengths of the source's artifacts in the pickle.

    Raises:
        ValueError: the pickle does not have the bytes of one.
    """
    for artifact in source.artifacts:
        if artifact not in string.artifacts:
            if artifact.content is None:
                raise ValueError(f"the artifact {artifact.digest} of the source is not one of the pickle")
            data = artifact.content.data
            yield f"{string.payload.index(data)}:{len(data)}"
