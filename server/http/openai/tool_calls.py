"""Tool calls in the text of a model: the formats in which models write them, and their parser."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from logitship.server.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls: JSON objects with the function's name and its arguments.

    Attributes:
        opens: text before a call, or before the first of several; "": calls begin the output.
        closes: text after it.
        arguments: key of the arguments.
        separator: text between two calls within `opens` and `closes`; "": each call has its own.
        space: white space around the object.
    """

    opens: str
    closes: str
    arguments: str
    separator: str = ""
    space: str = ""

    def tag(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the structural tag of a call, with arguments in this format."""
        own = not self.separator
        begin, end = (f"{self.opens}{self.space}", f"{self.space}{self.closes}") if own else ("", "")
        start = f'{begin}{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": '
        return {"type": "tag", "begin": start, "content": content, "end": f"}}{end}"}


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments", space="\n")
LLAMA = ToolFormat("", "", "parameters", separator=";")
JSON_ARRAY = ToolFormat("[", "]", "parameters", separator=",")
"""The format of constrained calls by a model without a format of its own."""
TOOL_FORMATS = {"hermes": HERMES, "qwen": HERMES, "qwen25": HERMES, "llama3": LLAMA, "llama3_json": LLAMA}
"""The formats, by SGLang's and vLLM's names of their parsers."""
PYTHON_TAG = "<|python_tag|>"
"""Token that Llama's models may write before a call."""


def format_of_template(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format that the model's chat template describes to the model; None if it is not a known one."""
    if not tokenizer.template_uses("tools"):
        return None
    if tokenizer.template_contains("<tool_call>"):
        # Others, such as Qwen3-Coder's, have XML within the same tag.
        return None if tokenizer.template_contains("<function=") else HERMES
    if tokenizer.template_contains(PYTHON_TAG) or tokenizer.template_contains('{"name": function name, "parameters"'):
        return LLAMA
    return None


@dataclass(frozen=True)
class ToolCallPart:
    """A part of a tool call.

    Attributes:
        index: which call of the answer it belongs to.
        arguments: new text of the arguments.
        name: name of the function, in the first part of a call.
    """

    index: int
    arguments: str
    name: str | None = None


OutputPart: TypeAlias = str | ToolCallPart
"""A part of an answer: text, or a part of a tool call."""

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Beginning of a call whose arguments can be streamed."""
_MAX_HEAD = 2048
"""Most characters of it."""
_BRACES = re.compile(r'["{}\[\]\\]')


class _JsonEnd:
    """Finds the end of a JSON object or list in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """Return how much of `text` belongs to the value that ends in it, or None if it goes on."""
        if self._escaped and text:
            text, offset, self._escaped = text[1:], 1, False
        else:
            offset = 0
        place = 0
        while found := _BRACES.search(text, place):
            place = found.end()
            sign = found[0]
            if sign == "\\":
                if self._in_string:
                    self._escaped = place == len(text)
                    place += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return place + offset
        return None


class ToolCallParser:
    """Separates the tool calls in an output from its text, as the output arrives. Invalid calls remain text.

    Args:
        format: how the model writes calls.
        names: the functions that may be called.
        parallel: False: only the first call counts.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self._format = format
        self._names = names
        self._parallel = parallel
        self.num_calls = 0
        self._buffer = ""
        self._opened = ""
        """Text before the call that is being read, which is text of the answer if it turns out not to be one."""
        self._is_after_call = False
        """No text was read since the last call: white space there separates calls."""
        self._end = _JsonEnd()
        self._scanned = 0
        self._read = self._read_text if format.opens else self._read_start

    def push(self, text: str) -> list[OutputPart]:
        """Return the parts that became known."""
        self._buffer += text
        return list(self._parts())

    def flush(self) -> list[OutputPart]:
        """Return the rest, at the end of the output."""
        rest = self._opened + self._buffer
        self._opened = self._buffer = ""
        if self._read in (self._read_arguments, self._read_rest) or not rest:
            return []
        if self.num_calls and rest.strip() in ("", self._format.separator):
            return []
        return [rest]

    def _parts(self) -> Iterator[OutputPart]:
        """Run the current state until it needs more text. A state returns None then."""
        while self._buffer:
            state = self._read
            part = state()
            if part is not None:
                if part != "" and (self._parallel or isinstance(part, str) or part.index == 0):
                    yield part
            elif self._read == state:
                return

    def _read_text(self) -> OutputPart | None:
        """Read text up to the next call."""
        opens, buffer = self._format.opens, self._buffer
        if self._is_after_call:
            buffer = buffer.lstrip()
        if not buffer:
            return None
        place = buffer.find(opens)
        if place >= 0:
            self._opened, self._buffer = opens, buffer[place + len(opens) :]
            self._start_call()
            return buffer[:place]
        held = next((n for n in range(len(opens) - 1, 0, -1) if buffer.endswith(opens[:n])), 0)
        self._buffer = buffer[len(buffer) - held :]
        if held == len(buffer):
            return None
        self._is_after_call = False
        return buffer[: len(buffer) - held]

    def _read_start(self) -> OutputPart | None:
        """Read the beginning of an output that is either calls or text."""
        start = self._buffer.lstrip()
        if start.startswith(PYTHON_TAG):
            self._opened, self._buffer = PYTHON_TAG, start.removeprefix(PYTHON_TAG)
            self._start_call()
        elif start.startswith("{"):
            self._start_call()
        elif start and not PYTHON_TAG.startswith(start):
            self._read = self._read_plain
        return None

    def _read_plain(self) -> OutputPart | None:
        """Pass text on."""
        text, self._buffer = self._opened + self._buffer, ""
        self._opened = ""
        return text

    def _start_call(self) -> None:
        self._end, self._scanned = _JsonEnd(), 0
        self._read = self._read_call

    def _count_call(self) -> None:
        self.num_calls += 1
        self._is_after_call = True

    def _read_call(self) -> OutputPart | None:
        """Read a call up to its arguments, or all of it if it is written in another order."""
        if self._scanned == 0:
            stripped = self._buffer.lstrip()
            if not stripped:
                return None
            if not stripped.startswith("{"):
                return self._reject()
            self._opened += self._buffer[: len(self._buffer) - len(stripped)]
            self._buffer = stripped
        if (head := _HEAD.match(self._buffer[:_MAX_HEAD])) and (name := _name(head[1])) in self._names:
            self._buffer = self._buffer[head.end() :]
            self._opened = ""
            self._end = _JsonEnd()
            self._read = self._read_arguments
            self._count_call()
            return ToolCallPart(self.num_calls - 1, "", name)
        length = self._end.push(self._buffer[self._scanned :])
        if length is None:
            self._scanned = len(self._buffer)
            return None
        length += self._scanned
        if (call := self._whole_call(self._buffer[:length])) is None:
            return self._reject()
        self._opened, self._buffer = "", self._buffer[length:]
        self._read = self._read_rest
        self._count_call()
        return ToolCallPart(self.num_calls - 1, call[1], call[0])

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            return (name, arguments) if _is_encodable(arguments) else None
        arguments = {} if arguments is None else arguments
        text = json.dumps(arguments, ensure_ascii=False)
        return name, text if _is_encodable(text) else json.dumps(arguments)

    def _read_arguments(self) -> OutputPart | None:
        """Read arguments as they come."""
        length = self._end.push(self._buffer)
        if length is None:
            arguments, self._buffer = self._buffer, ""
        else:
            arguments, self._buffer = self._buffer[:length], self._buffer[length:]
            self._read = self._read_brace
        return ToolCallPart(self.num_calls - 1, arguments)

    def _read_brace(self) -> OutputPart | None:
        """Read the end of a call whose arguments were streamed."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._buffer = self._buffer.removeprefix("}")
            self._read = self._read_rest
        return None

    def _read_rest(self) -> OutputPart | None:
        """Read the text between a call and the next one."""
        buffer = self._buffer.lstrip()
        closes, separator = self._format.closes, self._format.separator
        if separator and buffer.startswith(separator):
            self._opened, self._buffer = separator, buffer.removeprefix(separator)
            self._start_call()
        elif closes and buffer.startswith(closes):
            self._buffer = buffer.removeprefix(closes)
            self._read = self._read_text if not separator else self._read_plain
        elif buffer and not closes.startswith(buffer):
            self._buffer = buffer
            self._read = self._read_text if closes and not separator else self._read_plain
        return None

    def _reject(self) -> str:
        """Make the opening text a part of the answer's text. The rest is read as text, too."""
        text, self._opened, self._is_after_call = self._opened, "", False
        self._read = self._read_text if self._format.opens and not self._format.separator else self._read_plain
        return text


def _name(quoted: str) -> str | None:
    try:
        name: str = json.loads(quoted)
    except ValueError:
        return None
    return name


def _is_encodable(text: str) -> bool:
    """Return False if a text contains an unpaired surrogate, which a model can write as an escape in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
