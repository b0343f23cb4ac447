"""dspy: its language model, which goes through litellm."""

import dspy
from client_settings import BASE_URL, PROCESSOR

model = dspy.LM("openai/tiny", api_base=BASE_URL, api_key="any", cache=False, max_tokens=5, extra_body=PROCESSOR)
[answer] = model("a")
assert (answer if isinstance(answer, str) else answer["text"]) == "OOOOO"
