"""instructor: Mode.TOOLS and Mode.JSON_SCHEMA."""

import instructor
import openai
from client_settings import BASE_URL, PROCESSOR, City

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="any", max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        response_model=City,
        max_retries=0,
        max_tokens=99,
        extra_body=PROCESSOR,
    )
    assert city.city == "Oslo", mode
