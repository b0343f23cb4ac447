"""Building of HTTP requests from arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import orjson
import pytest

from logitship.client.http import http_requests as requests
from logitship.client.http.http_requests import HttpRequest
from logitship.client.http.request_options import ChatOptions, CompletionOptions, GenerateOptions
from logitship.client.http.vllm_requests import translate_for_vllm
from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor

DIGEST = "sha256:" + "0" * 64


class Shipped:
    """Fake processor class: the request builder only uses `to_str`."""

    calls: ClassVar[int] = 0

    @classmethod
    def to_str(cls) -> str:
        cls.calls += 1
        return f'{{"callable": "{cls.__name__}"}}'


class Configured(Shipped):
    def __init__(self, token_id: int) -> None:
        self.token_id = token_id


def generate_body(prompt: Any, n: int | None = None, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = requests.generate(prompt, n, cast(GenerateOptions, options), stream=False).json
    return body


def test_minimal_generate_request() -> None:
    request = requests.generate("Hi", None, GenerateOptions(), stream=False)
    assert (request.method, request.path, request.stream, request.idempotent) == ("POST", "/generate", False, False)
    assert orjson.loads(request.content or b"") == {"text": "Hi", "stream": False, "sampling_params": {}}


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("Hi", "text"), (["a", "b"], "text"), ([1, 2], "input_ids"), ([[1], [2, 3]], "input_ids"), ((1, 2), "input_ids")],
)
def test_prompt_field(prompt: Any, field: str) -> None:
    body = generate_body(prompt)
    assert body[field] == prompt
    assert len({"text", "input_ids"} & body.keys()) == 1


def test_thinking_budget_names() -> None:
    assert generate_body("Hi", thinking_token_budget=5)["sampling_params"] == {"thinking_token_budget": 5}
    body = generate_body("Hi", max_thinking_tokens=5)
    assert (body["max_thinking_tokens"], body["sampling_params"]) == (5, {})
    completion = requests.completions("Hi", None, CompletionOptions(thinking_token_budget=5), stream=False)
    assert completion.json["thinking_token_budget"] == 5
    chat = requests.chat([{"role": "user"}], None, ChatOptions(thinking_token_budget=5), stream=False)
    assert chat.json["thinking_token_budget"] == 5


def test_sampling_params_are_separated() -> None:
    body = generate_body("Hi", 2, temperature=0.5, seed=7, stop=["."], return_logprob=True, rid="r1", top_k=None)
    assert body["sampling_params"] == {"temperature": 0.5, "sampling_seed": 7, "stop": ["."], "n": 2}
    assert body["return_logprob"] is True
    assert body["rid"] == "r1"


def test_each_method_takes_both_names_of_lengths() -> None:
    sampling = generate_body("Hi", max_tokens=3, min_tokens=1)["sampling_params"]
    assert sampling == {"max_new_tokens": 3, "min_new_tokens": 1}
    lengths: Any = {"max_new_tokens": 3, "min_new_tokens": 1}
    messages = [{"role": "user", "content": "Hi"}]
    chat = requests.chat(messages, None, lengths, stream=False)
    completions = requests.completions("a", None, lengths, stream=False)
    for request in (chat, completions):
        assert (request.json["max_tokens"], request.json["min_tokens"]) == (3, 1)
        assert "max_new_tokens" not in request.json
    assert generate_body("Hi", max_tokens=3, max_new_tokens=3)["sampling_params"] == {"max_new_tokens": 3}
    with pytest.raises(ValueError, match="max_tokens: differs from max_new_tokens"):
        generate_body("Hi", max_tokens=3, max_new_tokens=4)


def test_logit_bias_keys_become_strings() -> None:
    assert generate_body("Hi", logit_bias={5: -1.5})["sampling_params"]["logit_bias"] == {"5": -1.5}


def test_params_become_custom_params() -> None:
    body = generate_body("Hi", processor="disallowed_tokens", params={"token_ids": [3]})
    assert body["sampling_params"] == {"custom_params": {"token_ids": [3]}}
    assert orjson.loads(body["custom_logit_processor"]) == {"name": "disallowed_tokens"}


def test_batch_with_processor_and_params_per_prompt() -> None:
    body = generate_body(
        ["a", "b", "c"], processor=[Shipped, None, "x"], params=[{"k": 1}, None, {"k": 3}], temperature=0.0
    )
    assert body["custom_logit_processor"] == ['{"callable": "Shipped"}', None, '{"name":"x"}']
    assert body["sampling_params"] == [
        {"temperature": 0.0, "custom_params": {"k": 1}},
        {"temperature": 0.0},
        {"temperature": 0.0, "custom_params": {"k": 3}},
    ]


def test_several_processors_keep_their_order() -> None:
    assert generate_body("a", processor=["x", "y"])["custom_logit_processor"] == ['{"name":"x"}', '{"name":"y"}']
    batch = generate_body(["a", "b"], processor=[["x", "y"], None])
    assert batch["custom_logit_processor"] == [['{"name":"x"}', '{"name":"y"}'], None]


@pytest.mark.parametrize(
    ("processor", "form"),
    [
        (Shipped, {"callable": "Shipped"}),
        (Shipped(), {"callable": "Shipped"}),
        ('{"callable": "00", "of": "a newer version"}', {"callable": "00", "of": "a newer version"}),
        ({"source": "class P: ...", "class_name": "P"}, {"source": "class P: ...", "class_name": "P"}),
        ({"digest": DIGEST}, {"digest": DIGEST}),
        ({"name": "min_p"}, {"name": "min_p"}),
        ("disallowed_tokens", {"name": "disallowed_tokens"}),
        ("my_package.processors:Mine", {"name": "my_package.processors:Mine"}),
        (DIGEST, {"digest": DIGEST}),
        (RegisteredProcessor(DIGEST), {"digest": DIGEST}),
        (InstalledProcessor("min_p"), {"name": "min_p"}),
    ],
)
def test_processor_argument_forms(processor: Any, form: dict[str, Any]) -> None:
    assert orjson.loads(generate_body("Hi", processor=processor)["custom_logit_processor"]) == form


def test_class_is_serialized_once_per_request() -> None:
    class Local(Shipped):
        calls = 0

    generate_body(["a"] * 8, processor=[Local] * 8)
    assert Local.calls == 1
    generate_body("a", processor=Local)
    assert Local.calls == 2, "helpers and constants that the class uses may have changed since"
    reference = weakref.ref(Local)
    del Local
    gc.collect()
    assert reference() is None


def test_instance_with_attributes_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"processor: expected the class Configured, not an instance with the attributes \['tok"
    ):
        generate_body("Hi", processor=Configured(5))


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, ValueError, "prompt: the text is empty"),
        ([], {}, ValueError, "prompt: the list is empty"),
        (["a", ""], {}, ValueError, r"prompt\[1\]: the prompt is empty"),
        ([[1], []], {}, ValueError, r"prompt\[1\]: the prompt is empty"),
        (["a", [1]], {}, TypeError, r"prompt\[1\]: all prompts of a batch"),
        ([1, "a"], {}, TypeError, r"prompt\[1\]: expected a token id, not str"),
        ([1, True], {}, TypeError, r"prompt\[1\]: expected a token id, not bool"),
        ([[1, -2]], {}, ValueError, r"prompt\[0\]\[1\]: a token id cannot be negative: -2"),
        (b"Hi", {}, TypeError, "prompt: expected text, token ids, or a list of one of them, not bytes"),
        ("Hi", {"n": 0}, ValueError, "n: must be 1 or greater, not 0"),
        ("Hi", {"n": True}, TypeError, "n: expected an integer, not bool"),
        ("Hi", {"temprature": 1}, TypeError, "unknown argument 'temprature': did you mean 'temperature'"),
        ("Hi", {"xyz": 1}, TypeError, "unknown argument 'xyz': .*extra_body"),
        ("Hi", {"temperature": float("nan")}, ValueError, "temperature: nan has no JSON form"),
        ("Hi", {"params": {"a": [1.0, float("-inf")]}}, ValueError, r"params\['a'\]\[1\]: -inf has no JSON form"),
        ("Hi", {"params": {5: 1}}, TypeError, "params: the keys of a JSON object are strings, not int"),
        ("Hi", {"params": {"a": {1, 2}}}, TypeError, r"params\['a'\]: set has no JSON form"),
        ("Hi", {"params": {"a": 1 << 64}}, ValueError, r"params\['a'\]: an integer of more than 64 bits"),
        ("Hi", {"params": {"\ud800": 1}}, ValueError, r"params: the unpaired surrogate '\\ud800' at 0 has no"),
        ("Hi", {"stop": ["a\udfff"]}, ValueError, r"stop\[0\]: the unpaired surrogate '\\udfff' at 1 has no"),
        ("a\ud800", {}, ValueError, "prompt: the unpaired surrogate"),
        (["a", "\ud800"], {}, ValueError, r"prompt\[1\]: the unpaired surrogate"),
        ([1, 1 << 64], {}, ValueError, r"prompt\[1\]: an integer of more than 64 bits cannot be sent"),
        ("Hi", {"params": {"__req__": 1}}, ValueError, "params: the key '__req__' is reserved"),
        ("Hi", {"params": 5}, TypeError, "params: expected a dict, not int"),
        ("Hi", {"params": [{}]}, ValueError, "params: a list needs a list of prompts"),
        (["a", "b"], {"params": [{}]}, ValueError, "params: 1 entries for 2 prompts"),
        (["a", "b"], {"params": [{}, 5]}, TypeError, r"params\[1\]: expected a dict"),
        ("Hi", {"processor": [Shipped, None]}, TypeError, r"processor\[1\]: expected a CustomLogitProcessor"),
        (["a", "b"], {"processor": [[5], None]}, TypeError, r"processor\[0\]\[0\]: expected a CustomLogitProcessor"),
        (["a", "b"], {"processor": [Shipped]}, ValueError, "processor: 1 entries for 2 prompts"),
        (
            ["a", "b"],
            {"processor": [None, 5]},
            TypeError,
            r"processor\[1\]: expected a CustomLogitProcessor .* not int",
        ),
        ("Hi", {"processor": int}, TypeError, "processor: .* not the class int"),
        ("Hi", {"processor": ""}, ValueError, "processor: the text is empty"),
        ("Hi", {"processor": {"digest": "sha256:5"}}, ValueError, "processor: 'digest' is not"),
        ("Hi", {"processor": {"path": "p.py"}}, ValueError, "processor: .* none of the keys"),
        ("Hi", {"rid": ["a"]}, ValueError, "rid: a list needs"),
        (["a", "b"], {"rid": ["r"]}, ValueError, "rid: 1 entries for 2 prompts"),
        ("Hi", {"logit_bias": [1]}, TypeError, "logit_bias: expected a dict"),
    ],
)
def test_invalid_arguments_are_named(
    prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate_body(prompt, **options)


def test_completions() -> None:
    options = CompletionOptions(model="m", max_tokens=5, processor=Shipped, params={"k": 1}, extra_body={"best_of": 2})
    request = requests.completions("Hi", 2, options, stream=True)
    assert request.path == "/v1/completions"
    assert request.stream
    assert request.json == {
        "prompt": "Hi",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "model": "m",
        "max_tokens": 5,
        "custom_logit_processor": '{"callable": "Shipped"}',
        "custom_params": {"k": 1},
        "best_of": 2,
    }


def test_chat() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    request = requests.chat(messages, None, ChatOptions(max_tokens=5), stream=False)
    assert request.path == "/v1/chat/completions"
    assert request.json == {"messages": messages, "stream": False, "max_tokens": 5}


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("Hi", TypeError, "messages: expected a list such as"),
        ({"role": "user"}, TypeError, "messages: expected a list such as"),
        ([], ValueError, "messages: the list is empty"),
        ([{"content": "Hi"}], TypeError, r"messages\[0\]: expected a dict with 'role'"),
        (["Hi"], TypeError, r"messages\[0\]: expected a dict with 'role'"),
        ([{"role": "user", "x": float("nan")}], ValueError, r"messages\[0\]\['x'\]: nan has no JSON form"),
        ([{"role": "user", "content": "\ud800"}], ValueError, r"messages\[0\]\['content'\]: the unpaired surrogate"),
    ],
)
def test_malformed_messages(messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        requests.chat(messages, None, ChatOptions(), stream=False)


class Word(str):
    """A string of another class."""


class Pair(NamedTuple):
    first: int
    second: str


VALUES = {"float64": np.float64(0.5), "pair": Pair(1, "é"), "mapping": MappingProxyType({Word("a"): (Word("b"), True)})}
VALUES_IN_JSON = '{"float64":0.5,"pair":[1,"é"],"mapping":{"a":["b",true]}}'


@pytest.mark.parametrize("translate", [lambda request: request, translate_for_vllm])
def test_values_that_are_converted_to_json(translate: Callable[[HttpRequest], HttpRequest]) -> None:
    several = [{"processor": Shipped, "params": VALUES}]
    requests_with_values = [
        requests.generate("Hi", None, GenerateOptions(params=VALUES), stream=False),
        requests.generate("Hi", None, GenerateOptions(logits_processors=several), stream=False),
        requests.chat([MappingProxyType({"role": "user", "x": VALUES})], None, ChatOptions(), stream=False),
    ]
    for request in requests_with_values:
        content = (translate(request).content or b"").decode()
        assert VALUES_IN_JSON in content.replace("\\", "")  # vLLM's is JSON in JSON


def test_openai_params_must_be_one_dict() -> None:
    with pytest.raises(TypeError, match="params: this route takes one dict"):
        requests.completions(["a"], None, CompletionOptions(params=[{}]), stream=False)


def test_register_sends_processor_form() -> None:
    request = requests.register({"name": "min_p"}).request
    assert (request.path, request.json, request.idempotent) == ("/v1/processors", {"name": "min_p"}, True)
    assert requests.register({"name": "min_p"}, "a b&c@ä").request.path == "/v1/processors?name=a%20b%26c%40%C3%A4"
    for name in ("", 5):
        with pytest.raises(ValueError, match="name: expected a string"):
            requests.register({"name": "min_p"}, name)  # type: ignore[arg-type]


def test_processor_id_in_path() -> None:
    for id, path in (
        ("Lipogram@2", "Lipogram@2"),
        (DIGEST, DIGEST),
        ("a/../b?c", "a%2F..%2Fb%3Fc"),
        (RegisteredProcessor(DIGEST), DIGEST),
        (RegisteredProcessor(DIGEST, "Lipogram@2"), "Lipogram@2"),
    ):
        assert requests.processor(id) == HttpRequest("GET", f"/v1/processors/{path}", idempotent=True)
        # Not idempotent: a second attempt would get 404 although the first one succeeded.
        assert requests.delete_processor(id) == HttpRequest("DELETE", f"/v1/processors/{path}")
    for nothing in ("", None, 5):
        with pytest.raises(ValueError, match="id: expected a name"):
            requests.processor(nothing)  # type: ignore[arg-type]


def test_abort_with_empty_rid_is_refused() -> None:
    assert requests.abort("r1").json == {"rid": "r1", "abort_all": False}
    assert requests.abort(None).json == {"rid": "", "abort_all": True}
    with pytest.raises(ValueError, match="rid: expected the id"):
        requests.abort("")


@pytest.mark.parametrize(
    ("prompt", "n", "many"),
    [
        ("a", None, False),
        ([1, 2], None, False),
        (["a"], None, True),
        ([[1]], None, True),
        ("a", 1, True),
        ("a", 3, True),
    ],
)
def test_is_many(prompt: Any, n: int | None, many: bool) -> None:
    assert requests.is_many(prompt, n) is many


class PlainHuggingFace:
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class Plain:
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits


def plain_function(logits: Any, custom_param_list: Any = None) -> Any:
    return logits


@pytest.mark.parametrize(
    ("processor", "advice"),
    [
        (PlainHuggingFace, "not the class PlainHuggingFace. It takes (input_ids, scores), as those of Hugging Face: "),
        (
            PlainHuggingFace(),
            "not PlainHuggingFace. It takes (input_ids, scores), as those of Hugging Face: derive its ",
        ),
        (lambda input_ids, scores: scores, "not function. It takes (input_ids, scores), as those of Hugging Face: "),
        (Plain, "not the class Plain. Derive a class from logitship.CustomLogitProcessor with __call__(self, logits"),
        (plain_function, "not function. Derive a class from logitship.CustomLogitProcessor with __call__(self, logits"),
        (print, "not builtin_function_or_method. Derive a class from logitship.CustomLogitProcessor"),
    ],
)
def test_plain_classes_and_functions_get_advice(processor: Any, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        requests.generate("Hi", None, {"processor": processor}, stream=False)
    assert advice in str(caught.value)
