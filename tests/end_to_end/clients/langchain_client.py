"""langchain-openai: text, streams, function calling and JSON schemas."""

from client_settings import BASE_URL, PROCESSOR, City
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=BASE_URL, api_key="any", model="tiny", max_retries=0, extra_body=PROCESSOR, max_tokens=5)
assert model.invoke("a").content == "OOOOO"
assert "".join(chunk.content for chunk in model.stream("a")) == "OOOOO"

model = ChatOpenAI(base_url=BASE_URL, api_key="any", model="tiny", max_retries=0, extra_body=PROCESSOR, max_tokens=99)
for method in ("function_calling", "json_schema"):
    assert model.with_structured_output(City, method=method).invoke("a") == City(city="Oslo")

answer = model.bind_tools([City], tool_choice="City").invoke("a")
[call] = answer.tool_calls
assert (call["name"], call["args"]) == ("City", {"city": "Oslo"})
conversation = ["a", answer, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
assert model.invoke(conversation, max_tokens=5).content == "OOOOO"
