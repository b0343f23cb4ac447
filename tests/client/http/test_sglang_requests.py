from __future__ import annotations

from typing import Any

import orjson
import pytest

from logitship.client.http.http_requests import HttpRequest, chat, completions, generate, get
from logitship.client.http.sglang_requests import has_several, translate_for_sglang

A, B = '{"name":"a"}', '{"name":"b"}'
ENTRIES = [{"processor": A, "params": {"x": 1}}, {"processor": B}]
MESSAGES = [{"role": "user", "content": "Hi"}]


def request(method: Any, prompt: Any, **options: Any) -> HttpRequest:
    built: HttpRequest = method(prompt, None, options, stream=False)
    return built


def sent(built: HttpRequest) -> Any:
    """Return what the plugin gets, with texts of lists parsed."""
    body = translate_for_sglang(built, has_plugin=True).json
    assert "logits_processors" not in body

    def parsed(string: Any) -> Any:
        return orjson.loads(string) if isinstance(string, str) and string.startswith("[") else string

    field = body.get("custom_logit_processor")
    return [parsed(each) for each in field] if isinstance(field, list) else parsed(field)


@pytest.mark.parametrize(
    ("method", "prompt"),
    [(generate, "Hi"), (generate, [1, 2]), (completions, "Hi"), (completions, [1, 2]), (chat, MESSAGES)],
)
def test_several_processors_of_one_prompt(method: Any, prompt: Any) -> None:
    assert sent(request(method, prompt, processor=[A, B])) == [{"processor": A}, {"processor": B}]
    assert sent(request(method, prompt, logits_processors=ENTRIES)) == ENTRIES


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]]])
def test_several_processors_for_each_prompt(prompts: Any) -> None:
    assert sent(request(generate, prompts, processor=[[A, B], None])) == [[{"processor": A}, {"processor": B}], None]
    assert sent(request(generate, prompts, processor=[A, [B]])) == [A, [{"processor": B}]]
    assert sent(request(generate, prompts, logits_processors=[ENTRIES, []])) == [ENTRIES, None]


@pytest.mark.parametrize("method", [generate, completions])
def test_several_processors_for_all_prompts(method: Any) -> None:
    assert sent(request(method, ["a", "b"], logits_processors=ENTRIES)) == ENTRIES


@pytest.mark.parametrize("options", [{}, {"processor": []}, {"logits_processors": []}])
def test_no_processors(options: dict[str, Any]) -> None:
    built = request(generate, "Hi", **options)
    assert not has_several(built)
    assert "custom_logit_processor" not in translate_for_sglang(built, has_plugin=False).json


@pytest.mark.parametrize(
    ("prompt", "processor"), [("Hi", A), ([1, 2], A), (["a", "b"], A), (["a", "b"], [A, None]), ([[1], [2]], [A, B])]
)
def test_what_sglang_knows_needs_no_plugin(prompt: Any, processor: Any) -> None:
    built = request(generate, prompt, processor=processor)
    assert not has_several(built)
    assert translate_for_sglang(built, has_plugin=False) == built
    assert translate_for_sglang(get("/v1/models"), has_plugin=False) == get("/v1/models")


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ("Hi", {"processor": [A, B]}, "processor"),
        (["a", "b"], {"processor": [[A, B], None]}, "processor"),
        ("Hi", {"logits_processors": ENTRIES}, "logits_processors"),
    ],
)
def test_several_processors_need_the_plugin(prompt: Any, options: dict[str, Any], name: str) -> None:
    """SGLang ignores `logits_processors`, and a list for one prompt ends its scheduler."""
    built = request(generate, prompt, **options)
    assert has_several(built)
    with pytest.raises(ValueError, match=f"^{name}: only SGLang with logitship's plugin runs several processors"):
        translate_for_sglang(built, has_plugin=False)


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (request(generate, "Hi", trace={"top": 3}), "trace: SGLang does not support traces"),
        (request(chat, MESSAGES, trace={"top": 3}), "trace: SGLang does not support traces"),
        (
            request(generate, "Hi", processor=A, extra_body={"logits_processors": ENTRIES}),
            "logits_processors: give either this or processor, not both",
        ),
        (request(completions, ["a", "b"], processor=[A, None]), "processor: in SGLang's completions all prompts share"),
        (
            request(completions, ["a", "b"], logits_processors=[ENTRIES, []]),
            "logits_processors: in SGLang's completions all prompts share",
        ),
    ],
)
def test_what_sglang_does_not_take(built: HttpRequest, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        translate_for_sglang(built, has_plugin=True)
