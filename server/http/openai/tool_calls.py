"""Tool calls in the text of a model: the formats in which models write them, and their parser."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from logitship.server.schemas.tool_schemas import MAX_TOOLS
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
_SIGNS = re.compile(r'["{}\[\]\\<]')


class _JsonEnd:
    """Finds the end of a JSON object or list in text that arrives in pieces.

    Args:
        depth: objects and lists that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """Return how much of `text` belongs to the value that ends in it, or None if it goes on.

        It also ends before a `<` outside of strings, which is no JSON but may begin a tag.
        """
        if self._escaped and text:
            text, offset, self._escaped = text[1:], 1, False
        else:
            offset = 0
        place = 0
        while found := _SIGNS.search(text, place):
            place = found.end()
            sign = found[0]
            if sign == "\\":
                if self._in_string:
                    self._escaped = place == len(text)
                    place += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                if sign == "<":
                    return place - 1 + offset
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return place + offset
        return None


class ToolCallParser:
    """Separates the tool calls in an output from its text, as the output arrives. Invalid calls remain text.

    Calls stand in blocks: between `opens` and `closes`, or all of the output. As models write it, a block may have
    several calls, with or without separators between them and brackets around them.

    Args:
        format: how the model writes calls.
        names: the functions that may be called.
        parallel: False: only the first call counts.
        only_calls: the output is constrained to calls: what is cut off is no text.
    """

    def __init__(
        self, format: ToolFormat, names: Collection[str], *, parallel: bool = True, only_calls: bool = False
    ) -> None:
        self._format = format
        self._names = names
        self._parallel = parallel
        self._only_calls = only_calls
        self.num_calls = 0
        self._buffer = ""
        self._opened = ""
        """Text since the last call, or since the block began, which is text of the answer if no call follows."""
        self._in_block = False
        """A call was read in the block, whose end is no text then."""
        self._in_list = False
        """The calls of the block are a list."""
        self._is_after_call = False
        """No text was read since the last call: white space there separates calls."""
        self._end = _JsonEnd()
        self._scanned = 0
        self._read = self._read_text if format.opens else self._read_between

    def push(self, text: str) -> list[OutputPart]:
        """Return the parts that became known."""
        self._buffer += text
        return list(self._parts())

    def flush(self) -> list[OutputPart]:
        """Return the rest, at the end of the output."""
        rest = self._opened + self._buffer
        self._opened = self._buffer = ""
        is_of_call = self._read in (self._read_arguments, self._read_rest, self._read_keys)
        is_end_of_block = self._in_block and self._read == self._read_between
        if is_of_call or is_end_of_block or self._only_calls or not rest:
            return []
        return [] if self._is_after_call and not rest.strip() else [rest]

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
        """Read text up to the next block, or up to the end of the one that it stands in."""
        buffer = self._buffer
        if self._is_after_call:
            buffer = buffer.lstrip()
        if not buffer:
            return None
        opens = self._format.opens
        tags = [opens, self._format.closes] if self._in_block else [opens]
        found = [(place, tag) for tag in tags if (place := buffer.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            self._buffer = buffer[place + len(tag) :]
            self._in_block = self._in_list = False
            if tag == opens:
                self._opened, self._read = opens, self._read_between
            return buffer[:place]
        held = max(_num_begun(buffer, tag) for tag in tags)
        self._buffer = buffer[len(buffer) - held :]
        if held == len(buffer):
            return None
        self._is_after_call = False
        return buffer[: len(buffer) - held]

    def _read_plain(self) -> OutputPart | None:
        """Pass text on."""
        text, self._buffer = self._buffer, ""
        return text

    def _read_between(self) -> OutputPart | None:
        """Read what stands before a call in a block, or after it."""
        opens, closes = self._format.opens, self._format.closes
        if self._buffer.startswith("{"):
            self._end, self._scanned = _JsonEnd(), 0
            self._read = self._read_call
            return None
        # Only a call gives tags a meaning: without one, all is text.
        tags = [tag for tag in (closes, opens) if tag and self._in_block] + ([] if opens else [PYTHON_TAG])
        for tag in tags:
            if self._buffer.startswith(tag):
                return self._read_tag(tag)
            if tag.startswith(self._buffer):
                return None
        if self._in_block and self._buffer.startswith("}"):
            self._buffer = self._buffer[1:]  # one too many, as Qwen's models write it
            return ""
        sign, self._buffer = self._buffer[0], self._buffer[1:]
        if not (sign.isspace() or sign in ",;[]"):
            self._buffer = sign + self._buffer
            return self._reject()
        self._opened += sign
        if sign == "[":
            self._in_list = True
        elif sign == "]" and self._in_block and self._in_list:
            self._opened, self._in_list = "", False
        return ""

    def _read_tag(self, tag: str) -> str | None:
        if tag == PYTHON_TAG:
            self._opened += tag
            self._buffer = self._buffer.removeprefix(tag)
            return ""
        self._opened = ""
        self._in_block = self._in_list = False
        self._read = self._read_plain if self._format.separator else self._read_text
        if tag == self._format.closes:
            self._buffer = self._buffer.removeprefix(tag)
        return ""

    def _count_call(self) -> None:
        self.num_calls += 1
        self._opened = ""
        self._in_block = self._is_after_call = True

    def _read_call(self) -> OutputPart | None:
        """Read a call up to its arguments, or all of it if it is written in another order."""
        if self.num_calls >= MAX_TOOLS:
            return self._reject()
        if (head := _HEAD.match(self._buffer[:_MAX_HEAD])) and (name := _name(head[1])) in self._names:
            self._buffer = self._buffer[head.end() :]
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
        self._buffer = self._buffer[length:]
        self._read = self._read_between
        self._count_call()
        return ToolCallPart(self.num_calls - 1, call[1], call[0])

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        call = _json(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str) or name not in self._names:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            is_object = isinstance(_json(arguments), dict) and _is_encodable(arguments)
            return (name, arguments) if is_object else None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return name, text if _is_encodable(text) else json.dumps(arguments)

    def _read_arguments(self) -> OutputPart | None:
        """Read arguments as they come."""
        length = self._end.push(self._buffer)
        if length is None:
            arguments, self._buffer = self._buffer, ""
        else:
            arguments, self._buffer = self._buffer[:length], self._buffer[length:]
            self._read = self._read_rest
        return ToolCallPart(self.num_calls - 1, arguments)

    def _read_rest(self) -> OutputPart | None:
        """Read what follows the arguments: the end of the call, or other keys."""
        rest = self._buffer.lstrip()
        if rest.startswith("}"):
            self._buffer = rest[1:]
            self._read = self._read_between
        elif rest.startswith(",") and (key := rest[1:].lstrip()):
            is_key = key.startswith('"')
            self._buffer, self._end = (key, _JsonEnd(depth=1)) if is_key else (rest, self._end)
            self._read = self._read_keys if is_key else self._read_between
        elif rest and rest[0] != ",":
            self._read = self._read_between  # the end is missing
        return None

    def _read_keys(self) -> OutputPart | None:
        """Skip the keys that follow the arguments."""
        length = self._end.push(self._buffer)
        if length is None:
            self._buffer = ""
            return None
        self._buffer = self._buffer[length:]
        self._read = self._read_between
        return None

    def _reject(self) -> str:
        """Make what was opened a part of the answer's text. The rest is read as text, too."""
        text = self._opened.lstrip() if self._in_block else self._opened
        self._opened, self._is_after_call = "", False
        self._read = self._read_text if self._format.opens and not self._format.separator else self._read_plain
        return text


def _num_begun(text: str, tag: str) -> int:
    """Return how many characters at the end of a text begin a tag."""
    return next((length for length in range(len(tag) - 1, 0, -1) if text.endswith(tag[:length])), 0)


def _json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


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
