"""Write `tests/data/protocol_fields.json`: the names of the request fields of SGLang, vLLM and OpenAI.

    pip download --no-deps -d WHEELS sglang==0.5.23 vllm==0.33.0 openai==3.54.0
    python tests/peers/record_protocol_fields.py WHEELS

The sources are parsed, not imported.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "protocol_fields.json"

SGLANG = "sglang/srt/entrypoints/openai/protocol.py"
VLLM = "vllm/entrypoints"
SOURCES: dict[str, list[tuple[str, str]]] = {
    "/generate": [("sglang/srt/managers/io_struct.py", "GenerateReqInput")],
    "/generate sampling_params": [("sglang/srt/sampling/sampling_params.py", "SamplingParams")],
    "/v1/completions": [
        (SGLANG, "PDRoutingFields"),
        (SGLANG, "CompletionRequest"),
        (f"{VLLM}/openai/completion/protocol.py", "CompletionRequest"),
        ("openai/types/completion_create_params.py", "CompletionCreateParamsBase"),
        ("openai/types/completion_create_params.py", "CompletionCreateParamsStreaming"),
    ],
    "/v1/chat/completions": [
        (SGLANG, "PDRoutingFields"),
        (SGLANG, "ChatCompletionRequest"),
        (f"{VLLM}/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
        ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsBase"),
        ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsStreaming"),
    ],
    "/v1/responses": [
        (SGLANG, "ResponsesRequest"),
        (f"{VLLM}/openai/responses/protocol.py", "ResponsesRequest"),
        ("openai/types/responses/response_create_params.py", "ResponseCreateParamsBase"),
        ("openai/types/responses/response_create_params.py", "ResponseCreateParamsStreaming"),
    ],
    "/v1/responses input": [
        ("openai/types/responses/easy_input_message_param.py", "EasyInputMessageParam"),
        # Conversations contain what responses contained.
        ("openai/types/responses/response_output_message_param.py", "ResponseOutputMessageParam"),
    ],
    "/v1/responses reasoning": [("openai/types/shared_params/reasoning.py", "Reasoning")],
    "/v1/responses text": [("openai/types/responses/response_text_config_param.py", "ResponseTextConfigParam")],
    "/v1/responses text.format": [
        (
            "openai/types/responses/response_format_text_json_schema_config_param.py",
            "ResponseFormatTextJSONSchemaConfigParam",
        ),
    ],
    "/tokenize": [
        (SGLANG, "TokenizeRequest"),
        (f"{VLLM}/serve/tokenize/protocol.py", "TokenizeCompletionRequest"),
        (f"{VLLM}/serve/tokenize/protocol.py", "TokenizeChatRequest"),
    ],
    "/detokenize": [
        (SGLANG, "DetokenizeRequest"),
        (f"{VLLM}/serve/tokenize/protocol.py", "DetokenizeRequest"),
    ],
    "messages": [
        (SGLANG, "ChatCompletionMessageGenericParam"),
        ("openai/types/chat/chat_completion_assistant_message_param.py", "ChatCompletionAssistantMessageParam"),
        ("openai/types/chat/chat_completion_tool_message_param.py", "ChatCompletionToolMessageParam"),
        ("openai/types/chat/chat_completion_user_message_param.py", "ChatCompletionUserMessageParam"),
        # Conversations contain what responses contained.
        (f"{VLLM}/openai/chat_completion/protocol.py", "ChatMessage"),
        ("openai/types/chat/chat_completion_message.py", "ChatCompletionMessage"),
    ],
    "messages.tool_calls": [
        (SGLANG, "ToolCall"),
        (f"{VLLM}/generate/base/protocol.py", "ToolCall"),
        (
            "openai/types/chat/chat_completion_message_function_tool_call_param.py",
            "ChatCompletionMessageFunctionToolCallParam",
        ),
    ],
    "tools": [
        (SGLANG, "Tool"),
        (f"{VLLM}/openai/chat_completion/protocol.py", "ChatCompletionToolsParam"),
        ("openai/types/chat/chat_completion_function_tool_param.py", "ChatCompletionFunctionToolParam"),
    ],
    "tools.function": [
        (SGLANG, "Function"),
        (f"{VLLM}/generate/base/protocol.py", "FunctionDefinition"),
        ("openai/types/shared_params/function_definition.py", "FunctionDefinition"),
    ],
    "stream_options": [
        (SGLANG, "StreamOptions"),
        (f"{VLLM}/generate/base/protocol.py", "StreamOptions"),
        ("openai/types/chat/chat_completion_stream_options_param.py", "ChatCompletionStreamOptionsParam"),
    ],
    "response_format.json_schema": [
        (SGLANG, "JsonSchemaResponseFormat"),
        (f"{VLLM}/generate/base/protocol.py", "JsonSchemaResponseFormat"),
        ("openai/types/shared_params/response_format_json_schema.py", "JSONSchema"),
    ],
    "structured_outputs": [("vllm/sampling_params.py", "StructuredOutputsParams")],
}


def main(wheels: Path) -> None:
    """Write the file."""
    archives = {path.name.split("-")[0]: zipfile.ZipFile(path) for path in wheels.glob("*.whl")}
    found: dict[str, dict[str, list[str]]] = {}
    for request, sources in SOURCES.items():
        peers = found.setdefault(request, {})
        for path, name in sources:
            package = path.split("/")[0]
            peers[package] = sorted({*peers.get(package, []), *_fields(archives[package].read(path).decode(), name)})
    DATA.write_text(json.dumps(found, indent=1) + "\n")


def _fields(source: str, name: str) -> list[str]:
    """Return the fields of a class, by the names in JSON."""
    [cls] = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return [_alias(node) or node.target.id for node in fields if not node.target.id.startswith("_")]


def _alias(node: ast.AnnAssign) -> str | None:
    if not isinstance(node.value, ast.Call):
        return None
    return next((key.value.value for key in node.value.keywords if key.arg == "alias"), None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
