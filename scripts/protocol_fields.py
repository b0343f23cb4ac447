"""Write `docs/protocol-fields.md` from the schemas and rules of requests: `python scripts/protocol_fields.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from logitship.server.schemas.field_rules import FieldRule, Ignored, Refused
from logitship.server.schemas.openai_schemas import ChatCompletionRequest, CompletionRequest, Message, StreamOptions
from logitship.server.schemas.request_schema import RequestModel
from logitship.server.schemas.responses_schemas import (
    InputMessage,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from logitship.server.schemas.sglang_schemas import GenerateRequest, SGLangSamplingParams
from logitship.server.schemas.structured_outputs import JsonSchemaFormat, StructuredOutputs
from logitship.server.schemas.tokenize_schemas import DetokenizeRequest, TokenizeRequest
from logitship.server.schemas.tool_schemas import FunctionDefinition, MessageToolCall, Tool

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "protocol-fields.md"
RECORDED = ROOT / "tests" / "data" / "protocol_fields.json"

MODELS: dict[str, type[RequestModel]] = {
    "/generate": GenerateRequest,
    "/generate sampling_params": SGLangSamplingParams,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses input": InputMessage,
    "/v1/responses reasoning": ReasoningOptions,
    "/v1/responses text": TextOptions,
    "/v1/responses text.format": TextFormat,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "messages": Message,
    "messages.tool_calls": MessageToolCall,
    "tools": Tool,
    "tools.function": FunctionDefinition,
    "stream_options": StreamOptions,
    "response_format.json_schema": JsonSchemaFormat,
    "structured_outputs": StructuredOutputs,
}
"""The schemas, by the names in the recorded file."""

INTRODUCTION = """\
# Fields of the protocols

<!-- Made by scripts/protocol_fields.py. -->

Clients that nobody here wrote send fields of SGLang's, vLLM's and OpenAI's protocols. This page lists all of SGLang
0.5.23, vLLM 0.33.0 and openai 3.54.0. Each is one of these:

- **honoured**: it does what it does there;
- **accepted**, because it cannot change the answer. The response's header `X-Logitship-Ignored` names those of the
  request, separated by commas;
- **refused** with 400, the name of the field and the reason. Values that ask for nothing, and `null`, are accepted.

Any other field is refused as unknown.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([INTRODUCTION, *_honoured(), *_accepted(), *_refused()])


def rule_of(request: str, field: str) -> FieldRule | None:
    """Return the rule of a field, None if it is honoured.

    Raises:
        KeyError: there is none: the field is unknown.
    """
    model = MODELS[request]
    known = {each.alias or name for name, each in model.model_fields.items()}
    return None if field in known else model.rules[field]


def fields_of_peers() -> Iterator[tuple[str, str, FieldRule | None]]:
    """Yield the request, name and rule of each field that a peer has."""
    for request, peers in json.loads(RECORDED.read_text()).items():
        for field in sorted({field for fields in peers.values() for field in fields}):
            yield request, field, rule_of(request, field)


def _honoured() -> Iterator[str]:
    yield "## Honoured\n"
    yield "| in | fields |\n|---|---|"
    for request in MODELS:
        fields = [field for each, field, rule in fields_of_peers() if each == request and rule is None]
        yield f"| `{request}` | {', '.join(f'`{field}`' for field in fields)} |"
    yield (
        "\n`reasoning_effort` and `verbosity` are variables for the chat template. With a template that does not use "
        "them\nthey are accepted like the fields below.\n"
    )


def _accepted() -> Iterator[str]:
    yield "## Accepted\n"
    yield "| field | in | why it cannot change the answer |\n|---|---|---|"
    for field, requests, rule in _by_rule():
        if isinstance(rule, Ignored):
            yield f"| `{field}` | {requests} | {rule.why} |"
    yield ""


def _refused() -> Iterator[str]:
    yield "## Refused\n"
    yield "| field | in | reason | accepted values |\n|---|---|---|---|"
    for field, requests, rule in _by_rule():
        if isinstance(rule, Refused):
            values = ", ".join(f"`{json.dumps(value)}`" for value in rule.noops)
            yield f"| `{field}` | {requests} | {rule.reason} | {values} |"
    yield ""


def _by_rule() -> list[tuple[str, str, FieldRule]]:
    """Return the fields with a rule, where it holds, and the rule."""
    found: dict[str, list[tuple[str, FieldRule]]] = {}
    for request, field, rule in fields_of_peers():
        if rule is not None:
            found.setdefault(field, []).append((request, rule))
    return [
        (field, ", ".join(f"`{request}`" for request, each in places if each is rule), rule)
        for field, places in sorted(found.items())
        for rule in {id(each): each for _, each in places}.values()
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
