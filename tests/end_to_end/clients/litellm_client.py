"""litellm: chats, completions, streams and tools."""

import litellm
from client_settings import BASE_URL, PROCESSOR, TOOL, City

TINY = {"api_base": BASE_URL, "api_key": "any", "extra_body": PROCESSOR, "max_tokens": 5}
MESSAGES = [{"role": "user", "content": "a"}]

answer = litellm.completion("openai/tiny", MESSAGES, **TINY)
assert answer.choices[0].message.content == "OOOOO"
stream = litellm.completion("openai/tiny", MESSAGES, stream=True, **TINY)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "OOOOO"
assert litellm.text_completion(prompt="a", model="text-completion-openai/tiny", **TINY).choices[0].text == "OOOOO"
TINY["max_tokens"] = 99
TINY |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
answer = litellm.completion("openai/tiny", MESSAGES, **TINY)
[call] = answer.choices[0].message.tool_calls
assert City.model_validate_json(call.function.arguments) == City(city="Oslo")
