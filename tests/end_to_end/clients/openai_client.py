"""openai: its parsing helper, for JSON schemas and tools, whole and as a stream, and raw responses."""

import openai
from client_settings import BASE_URL, PROCESSOR, City

client = openai.OpenAI(base_url=BASE_URL, api_key="any", max_retries=0)
request = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 99,
    "extra_body": PROCESSOR,
}
parsed = client.chat.completions.parse(**request, response_format=City)
assert parsed.choices[0].message.parsed == City(city="Oslo")
with client.chat.completions.stream(**request, response_format=City) as stream:
    assert stream.get_final_completion().choices[0].message.parsed == City(city="Oslo")

tools = {"tools": [openai.pydantic_function_tool(City)], "tool_choice": "required", "parallel_tool_calls": False}
parsed = client.chat.completions.parse(**request, **tools)
assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == City(city="Oslo")
assert parsed.choices[0].finish_reason == "tool_calls"
with client.chat.completions.stream(**request, **tools) as stream:
    call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == City(city="Oslo")

raw = client.chat.completions.with_raw_response.create(**request)
digests = raw.headers["X-Logitship-Processors"].split(", ")
assert digests == [receipt["digest"] for receipt in raw.parse().choices[0].receipts]

response = client.responses.create(model="tiny", input="a", max_output_tokens=9, extra_body=PROCESSOR)
assert response.output_text.count("O") == 9, response.output_text
assert [receipt["digest"] for receipt in response.receipts] == digests
with client.responses.stream(
    model="tiny", input="a", max_output_tokens=99, extra_body=PROCESSOR, text_format=City
) as stream:
    assert stream.get_final_response().output_parsed == City(city="Oslo")
parsed = client.responses.parse(model="tiny", input="a", max_output_tokens=99, extra_body=PROCESSOR, text_format=City)
assert parsed.output_parsed == City(city="Oslo")
