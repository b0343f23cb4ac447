"""guidance: text from a chat model."""

import guidance
from client_settings import BASE_URL, PROCESSOR
from guidance.models._openai_base import OpenAIClientWrapper

create = OpenAIClientWrapper.streaming_chat_completions
OpenAIClientWrapper.streaming_chat_completions = lambda *args, **kwargs: create(*args, extra_body=PROCESSOR, **kwargs)

model = guidance.models.OpenAI("tiny", api_key="any", base_url=BASE_URL, echo=False)
with guidance.user():
    model += "a"
with guidance.assistant():
    model += guidance.gen("answer", max_tokens=5)
assert model["answer"] == "OOOOO", model["answer"]
