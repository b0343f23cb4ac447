"""lm-eval: log-likelihoods and generation."""

from typing import Any
from urllib.request import Request, urlopen

import orjson
from client_settings import BASE_URL, PROCESSOR
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


class Tiny(LocalCompletionsAPI):
    """Attaches the processor, and tokenizes on the server."""

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super()._create_payload(*args, **kwargs) | PROCESSOR

    def tok_encode(self, string: str | list[str], **kwargs: Any) -> Any:
        """Return the tokens of a text, or of several."""
        body = orjson.dumps({"prompt": string, "add_special_tokens": False})
        with urlopen(Request(f"{BASE_URL}/tokenize", body, {"Content-Type": "application/json"})) as answer:
            return orjson.loads(answer.read())["tokens"]


def instances(kind: str, *arguments: Any) -> list[Instance]:
    """Return lm-eval's requests."""
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


model = Tiny(
    base_url=f"{BASE_URL}/completions", model="tiny", tokenizer_backend=None, max_length=512, eos_string="</s>"
)
[text] = model.generate_until(instances("generate_until", ("a", {"max_gen_toks": 5, "until": ["z"]})))
assert text == "OOOOO", text
# Processors see outputs: the log-probabilities of a prompt are the model's.
model.tokenizer, model.tokenizer_backend, model.tokenized_requests = object(), "huggingface", True
[(whole, _), (first, _)] = model.loglikelihood(instances("loglikelihood", ("a", "OO"), ("a", "O")))
assert whole < first < 0, (whole, first)
