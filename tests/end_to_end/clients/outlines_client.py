"""outlines: text and a JSON schema."""

import openai
import outlines
from client_settings import BASE_URL, PROCESSOR, City

model = outlines.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="any", max_retries=0), "tiny")
assert model("a", max_tokens=5, extra_body=PROCESSOR) == "OOOOO"
assert City.model_validate_json(model("a", City, max_tokens=99, extra_body=PROCESSOR)) == City(city="Oslo")
