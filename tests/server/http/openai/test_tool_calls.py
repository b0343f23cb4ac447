"""The parser of tool calls: any text, in any pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from logitship.server.http.openai.tool_call_stream import ToolCallStream
from logitship.server.http.openai.tool_calls import (
    HERMES,
    JSON_ARRAY,
    LLAMA,
    OutputPart,
    ToolCallParser,
    ToolCallPart,
    ToolFormat,
)
from logitship.server.http.openai.tool_use import ToolUse
from logitship.server.schemas.openai_schemas import Message
from logitship.server.schemas.tool_schemas import MAX_TOOLS, Tool

NAMES = frozenset({"weather", 'q"uote', "add"})
WEATHER = '{"name": "weather", "arguments": {"city": "Par}is \\" {"}}'
REVERSED = '{"arguments": {"city": 1}, "name": "weather"}'
UNKNOWN = '{"name": "other", "arguments": {}}'


def parsed(parts: list[OutputPart]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer."""
    texts, calls = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, part.arguments))
        else:
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return "".join(texts), calls


def parse(text: str, format: ToolFormat, sizes: Any = None, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(format, NAMES, **options)
    parts: list[OutputPart] = []
    while sizes is not None and text:
        size = next(sizes)
        parts += parser.push(text[:size])
        text = text[size:]
    parts += parser.push(text)
    return parsed([*parts, *parser.flush()])


CITY = ("weather", '{"city": "Par}is \\" {"}')
HERMES_CASES = {
    "Just text < with <tool a sign": ("Just text < with <tool a sign", []),
    f"<tool_call>\n{WEATHER}\n</tool_call>": ("", [CITY]),
    f"Let me see.\n<tool_call>{WEATHER}</tool_call>": ("Let me see.\n", [CITY]),
    f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{REVERSED}\n</tool_call>\n": (
        "",
        [CITY, ("weather", '{"city": 1}')],
    ),
    f"<tool_call>\n{WEATHER}\n</tool_call>\nand then more": ("and then more", [CITY]),
    f"<tool_call>\n{UNKNOWN}\n</tool_call>": (f"<tool_call>\n{UNKNOWN}\n</tool_call>", []),
    "<tool_call>not JSON</tool_call>": ("<tool_call>not JSON</tool_call>", []),
    '<tool_call>{"name": "weather", "argum': ('<tool_call>{"name": "weather", "argum', []),
    '<tool_call>{"name": "weather", "arguments": {"city": "Par': ("", [("weather", '{"city": "Par')]),
    '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("weather", '{"a": 1}')]),
    '<tool_call>{"name": "q\\"uote", "arguments": {}}</tool_call>': ("", [('q"uote', "{}")]),
    '<tool_call>{"name": "add"}</tool_call>': ("", [("add", "{}")]),
    f"<tool_call>{WEATHER}": ("", [CITY]),
    '<tool_call>{"name": {}}</tool_call>': ('<tool_call>{"name": {}}</tool_call>', []),
    '<tool_call>{"name": ["add"]}</tool_call>': ('<tool_call>{"name": ["add"]}</tool_call>', []),
    '<tool_call>{"arguments": {"é": "\\ud800"}, "name": "add"}</tool_call>': (
        "",
        [("add", '{"\\u00e9": "\\ud800"}')],
    ),
    '<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>': (
        '<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>',
        [],
    ),
    "<tool_call>\n": ("<tool_call>\n", []),
    "": ("", []),
}
LLAMA_WEATHER = WEATHER.replace("arguments", "parameters")
LLAMA_CASES = {
    "Text with { and }": ("Text with { and }", []),
    LLAMA_WEATHER: ("", [CITY]),
    f"<|python_tag|>{LLAMA_WEATHER}": ("", [CITY]),
    f" \n{WEATHER}; {LLAMA_WEATHER}": ("", [CITY, CITY]),
    UNKNOWN: (UNKNOWN, []),
    "<|python_tag|>print(1)": ("<|python_tag|>print(1)", []),
    '{"a": 1} is JSON': ('{"a": 1} is JSON', []),
    f"{LLAMA_WEATHER} is what I call": ("is what I call", [CITY]),
    f"{LLAMA_WEATHER}; {UNKNOWN}": (f"; {UNKNOWN}", [CITY]),
    f"{LLAMA_WEATHER}; ": ("", [CITY]),
}
ARRAY_CASES = {
    f"[{LLAMA_WEATHER}]": ("", [CITY]),
    f"[{LLAMA_WEATHER}, {LLAMA_WEATHER} ]": ("", [CITY, CITY]),
    f"[{LLAMA_WEATHER}, 1]": (", 1]", [CITY]),
}
CASES = [
    (format, text, expected)
    for format, cases in ((HERMES, HERMES_CASES), (LLAMA, LLAMA_CASES), (JSON_ARRAY, ARRAY_CASES))
    for text, expected in cases.items()
]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_whole_and_in_pieces(format: ToolFormat, text: str, expected: Any) -> None:
    assert parse(text, format) == expected
    for size in (1, 2, 3, 7):
        assert parse(text, format, iter(lambda size=size: size, None)) == expected
    rng = random.Random(0)
    for _ in range(20):
        assert parse(text, format, iter(lambda: rng.randint(1, 12), None)) == expected


def test_arguments_are_streamed() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>\n{"name": "add", "arguments": ') == []
    assert parser.push('{"a"') == [ToolCallPart(0, "", "add"), ToolCallPart(0, '{"a"')]
    assert parser.push(": 1") == [ToolCallPart(0, ": 1")]
    assert parser.push('}}\n</tool_call><tool_call>{"name": "add", "arguments": {') == [
        ToolCallPart(0, "}"),
        ToolCallPart(1, "", "add"),
        ToolCallPart(1, "{"),
    ]


def test_only_the_first_call_without_parallel() -> None:
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>"
    assert parse(text, HERMES, parallel=False) == ("", [CITY])


def test_text_is_never_lost_or_doubled() -> None:
    """Read random text in the alphabet of calls, which has none."""
    rng = random.Random(1)
    alphabet = ["<tool_call>", "</tool_call>", "{", "}", '"', "\\", ":", ",", " ", "\n", "name", "x", "["]
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 12)))
        found, calls = parse(text, HERMES, iter(lambda: rng.randint(1, 9), None))
        assert calls == []
        assert found == text


@pytest.mark.slow
def test_time_is_linear_in_the_length() -> None:
    """A parser that reads a call again with each token would take hours."""
    text = '<tool_call>{"x": "' + "y" * 300_000 + '", "name": "add"}</tool_call>'
    parser = ToolCallParser(HERMES, NAMES)
    parts = [part for character in text for part in parser.push(character)]
    assert parsed([*parts, *parser.flush()]) == ("", [("add", json.dumps({}))])


ADD = '{"name": "add", "arguments": {"a": 1}}'
ONE = ("add", '{"a": 1}')
BESIDE_CASES = [
    (HERMES, f'<tool_call>{ADD[:-1]}, "id": "}}</tool_call>"}}</tool_call>', ("", [ONE])),
    (HERMES, f'<tool_call>{ADD[:-1]}, "x": {{"y": [1]}}, "z": 2}}\n</tool_call>ok', ("ok", [ONE])),
    (HERMES, f"<tool_call>{ADD}}}}}\n</tool_call>", ("", [ONE])),
    (HERMES, f"<tool_call>{ADD[:-1]}\n</tool_call>", ("", [ONE])),
    (HERMES, f"<tool_call>{ADD[:-1]}, {ADD}\n</tool_call>", ("", [ONE, ONE])),
    (HERMES, f"<tool_call>{ADD[:-2]}</tool_call>", ("", [("add", '{"a": 1')])),
    (HERMES, f"<tool_call>{ADD}\n{ADD}, {ADD}</tool_call>{ADD}", (ADD, [ONE, ONE, ONE])),
    (HERMES, f"<tool_call>\n[{ADD}, {ADD}]\n</tool_call>", ("", [ONE, ONE])),
    (HERMES, f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", ("", [ONE, ONE])),
    (HERMES, f"<tool_call>{ADD} that is it</tool_call> ok", ("that is it ok", [ONE])),
    (HERMES, f"<tool_call>{ADD}; {UNKNOWN}</tool_call>", (f"; {UNKNOWN}", [ONE])),
    (HERMES, f"<tool_call>{ADD}</tool_c", ("", [ONE])),
    (HERMES, "<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
    (LLAMA, f'{ADD[:-1]}, "id": 1}}', ("", [ONE])),
    (LLAMA, f"{ADD}\n{ADD}", ("", [ONE, ONE])),
    (LLAMA, f"[{ADD}, {ADD}] done", ("done", [ONE, ONE])),
    (LLAMA, f"<|python_tag|>{ADD}<|python_tag|>{ADD}<|pyt", ("", [ONE, ONE])),
    (LLAMA, f"{ADD}<|python_tag|>print(1)", ("<|python_tag|>print(1)", [ONE])),
    (LLAMA, "[1, 2] is a list", ("[1, 2] is a list", [])),
    *(
        (LLAMA, text, (text, []))
        for arguments in ("[1]", "1", '"x"', '"[1]"', '{"a": NaN}', "true")
        for text in (f'{{"arguments": {arguments}, "name": "add"}}',)
    ),
]


@pytest.mark.parametrize(("format", "text", "expected"), BESIDE_CASES)
def test_what_stands_beside_arguments_and_calls(format: ToolFormat, text: str, expected: Any) -> None:
    assert parse(text, format) == expected
    for size in (1, 2, 5):
        assert parse(text, format, iter(lambda size=size: size, None)) == expected


def test_output_of_calls_alone_that_is_cut_off() -> None:
    text = f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>"
    for end in range(len(text)):
        content, calls = parse(text[:end], HERMES, only_calls=True)
        assert content == ""
        assert len(calls) <= 2


def test_calls_beyond_those_that_a_message_may_have_are_text() -> None:
    content, calls = parse(f"<tool_call>{ADD}</tool_call>" * (MAX_TOOLS + 1), HERMES)
    assert len(calls) == MAX_TOOLS
    assert content == f"<tool_call>{ADD}</tool_call>"


PIECES = [
    *(
        ADD,
        WEATHER,
        REVERSED,
        UNKNOWN,
        LLAMA_WEATHER,
        ADD[:-1],
        ADD[:-2],
        '{"name": "add"}',
        '{"name": "add", "arguments": ',
    ),
    *(
        '"arguments": {',
        '{"a": [[',
        '{"arguments": "{}", "name": "add"}',
        '{"arguments": [1], "name": "add"}',
        '"\\ud800"',
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<tool",
        "<|",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        '"',
        "\\",
        ": ",
        "\n",
    ),
    *(" ", "text", ', "id": "x"}', ', "id": {', "é\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")),
]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("format", [HERMES, LLAMA, JSON_ARRAY], ids=["hermes", "llama", "array"])
def test_any_text_streamed_equals_whole_and_is_accepted_as_history(format: ToolFormat, choice: str) -> None:
    rng = random.Random(1)
    tools = tuple(Tool.model_validate({"type": "function", "function": {"name": name}}) for name in sorted(NAMES))
    use = ToolUse(format, tools, choice, parallel=True)
    num_calls = 0
    for _ in range(1_500):
        text = rng.choice([format.opens, ""]) + "".join(rng.choices(PIECES, k=rng.randint(0, 9)))
        whole = ToolCallStream(use).message(text)
        calls = whole.get("tool_calls", [])
        num_calls += len(calls)
        Message.model_validate(whole).for_template()
        stream, content = ToolCallStream(use), ""
        streamed: list[list[str]] = []
        while text:
            size = rng.choice([1, 2, 3, 10, 50])
            delta = stream.delta(text[:size], is_last=size >= len(text))
            text = text[size:]
            content += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                if "name" in part["function"]:
                    streamed.append([part["function"]["name"], ""])
                streamed[part["index"]][1] += part["function"]["arguments"]
        assert content == (whole["content"] or "")
        assert streamed == [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    assert num_calls > 250
