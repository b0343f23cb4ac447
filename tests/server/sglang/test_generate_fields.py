from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.server.runtime.request_fields import MAX_PROCESSORS
from logitship.server.sglang.generate_fields import (
    ADMITTED,
    SENT,
    add_sent,
    mark_admitted,
    processors_of,
    read_body,
    read_mark,
    read_processors,
    sampling_params_of,
    uses_beam_search,
    with_params,
)
from tests.server.runtime.fake_engine import Job

from .fake_sglang import sampling_params

FORBIDS = json.dumps({"name": "disallowed_tokens"})
MARK = f"{ADMITTED}:"


def generate(string: Any, sampling_params: Any = None, **prompt: Any) -> Any:
    prompts = {"text": None, "input_ids": None, "input_embeds": None} | (prompt or {"input_ids": [[7], [8]]})
    return SimpleNamespace(custom_logit_processor=string, sampling_params=sampling_params, **prompts)


@pytest.mark.parametrize(
    ("string", "sampling_params", "expected"),
    [
        (None, {"custom_params": {"a": 1}}, []),
        ("", None, []),
        ("x", None, [("x", None)]),
        ("x", {"custom_params": {"a": 1}}, [("x", {"a": 1})]),
        (
            "x",
            [{"custom_params": {"a": 1}}, {"custom_params": {"a": 2}}, {}],
            [("x", {"a": 1}), ("x", {"a": 2}), ("x", None)],
        ),
        (["x", None, "x", "y"], {"custom_params": {"a": 1}}, [("x", {"a": 1}), ("y", {"a": 1})]),
        (["x", "y"], [{"custom_params": {"a": 1}}, {"custom_params": {"a": 2}}], [("x", {"a": 1}), ("y", {"a": 2})]),
        (["x", "y"], [{}], [("x", None), ("y", None)]),
    ],
)
def test_processors_of_a_request(string: Any, sampling_params: Any, expected: list[tuple[str, Any]]) -> None:
    assert processors_of(generate(string, sampling_params)) == expected


BUILTIN = {"name": "disallowed_tokens"}
SEVERAL = [{"processor": BUILTIN}, {"processor": FORBIDS, "params": {}}]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (FORBIDS, FORBIDS),
        (BUILTIN, '{"name":"disallowed_tokens"}'),
        (SEVERAL, json.dumps(SEVERAL, separators=(",", ":"))),
        ([FORBIDS, None, BUILTIN], [FORBIDS, None, '{"name":"disallowed_tokens"}']),
        ([SEVERAL, None], [json.dumps(SEVERAL, separators=(",", ":")), None]),
        (5, 5),
    ],
)
def test_objects_in_a_body_become_text(sent: Any, expected: Any) -> None:
    body = {"custom_logit_processor": sent, "custom_params": {"a": 1}}
    for _ in range(2):  # SGLang reads a body several times
        read_body(body, scope := {})
        assert body["custom_logit_processor"] == expected
        assert scope == {SENT: (expected, {"a": 1})}


@pytest.mark.parametrize("body", [None, [], "x", {}, {"custom_logit_processor": None}, {"custom_logit_processor": ""}])
def test_body_without_a_processor_is_left(body: Any) -> None:
    read_body(body, scope := {})
    assert not scope


def test_dropped_processor_is_added_or_refused() -> None:
    scope = {"path": "/v1/messages", SENT: (FORBIDS, {"token_ids": [1]})}
    added = generate(None, {"temperature": 0})
    add_sent(added, scope)
    assert added.custom_logit_processor == FORBIDS
    assert added.sampling_params == {"temperature": 0, "custom_params": {"token_ids": [1]}}
    kept = generate("other")
    add_sent(kept, scope)
    assert (kept.custom_logit_processor, kept.sampling_params) == ("other", None)
    with pytest.raises(ValueError, match="no processors on the route /v1/score"):
        add_sent(generate(None), scope | {"path": "/v1/score"})
    with pytest.raises(ValueError, match="no processors on the route /encode"):
        add_sent(SimpleNamespace(text="an embedding"), scope | {"path": "/encode"})


@pytest.mark.parametrize("strings", [[None, {"name": "disallowed_tokens"}], ["x", []]])
def test_processor_that_is_no_string_is_refused(strings: list[Any]) -> None:
    with pytest.raises(ValueError, match="must be a string"):
        processors_of(generate(strings))


@pytest.mark.parametrize("prompt", [{"text": "hi"}, {"input_ids": [7, 8]}, {"input_ids": []}])
@pytest.mark.parametrize("strings", [["x"], [None], []])
def test_list_for_one_prompt_is_refused(strings: list[Any], prompt: dict[str, Any]) -> None:
    """SGLang's scheduler would get the list, and stop."""
    assert processors_of(generate("x", **prompt)) == [("x", None)]
    with pytest.raises(ValueError, match="custom_logit_processor: must be a string, because there is one prompt"):
        processors_of(generate(strings, **prompt))
    assert processors_of(generate(["x"], text=["hi"])) == [("x", None)]


def test_prompt_of_embeddings_is_refused() -> None:
    """SGLang would show its processors a prompt of ones."""
    assert processors_of(generate(None, input_embeds=[[0.5]])) == []
    for strings in "x", ["x"], []:
        with pytest.raises(ValueError, match="input_embeds: "):
            processors_of(generate(strings, input_embeds=[[0.5]]))


def test_many_params_are_compared_in_linear_time() -> None:
    """This runs in SGLang's event loop."""
    params = [{"custom_params": {"a": number, "b": [number % 2]}} for number in range(20000)]
    began = time.process_time()
    assert len(processors_of(generate("x", params + params[:10]))) == 20000
    assert time.process_time() - began < 2


def test_params_that_are_not_json_are_compared_by_identity() -> None:
    """The parameters of SGLang's `Engine` may be any objects."""
    both = {"a": object()}
    params = [{"custom_params": both}, {"custom_params": both}, {"custom_params": dict(both)}]
    assert processors_of(generate("x", params)) == [("x", both), ("x", both)]


@pytest.mark.parametrize(
    ("sampling_params", "expected"),
    [
        (None, False),
        ({}, False),
        ({"beam_width": None}, False),
        ({"beam_width": 1}, False),
        ({"beam_width": 2}, True),
        ([{}, {"beam_width": 4}], True),
    ],
)
def test_beam_search_is_found(sampling_params: Any, expected: bool) -> None:
    assert uses_beam_search(generate("x", sampling_params)) is expected


@pytest.mark.parametrize("strings", ["x", ["x", None, "", "y"]])
def test_admitted_strings_are_no_json(strings: Any) -> None:
    request = generate(strings)
    mark_admitted(request, "a1")
    marked = request.custom_logit_processor
    for before, after in zip(strings, marked, strict=True) if isinstance(strings, list) else [(strings, marked)]:
        if not before:
            assert after == before
            continue
        with pytest.raises(json.JSONDecodeError):
            json.loads(after)
        assert read_mark(after) == ("a1", before)
    with pytest.raises(ValueError, match="has not been checked"):
        read_mark("x")


def test_one_processor_has_the_params_of_the_request_and_several_their_own() -> None:
    (only,) = with_params(read_processors(FORBIDS, 1000), {"token_ids": [1]})
    assert (only.string, only.params) == (InstalledProcessor("disallowed_tokens"), {"token_ids": [1]})
    entries = [{"processor": {"name": "min_tokens"}, "params": {"a": 1}}, {"processor": FORBIDS}]
    first, second = with_params(read_processors(json.dumps(entries), 1000), {"b": 2})
    assert (first.string, first.params) == (InstalledProcessor("min_tokens"), {"a": 1})
    assert (second.string, second.params) == (InstalledProcessor("disallowed_tokens"), {"b": 2})


@pytest.mark.parametrize(
    ("string", "params", "message"),
    [
        ("nonsense", None, "custom_logit_processor: the processor string is not JSON"),
        (FORBIDS, [1], "custom_params: must be an object"),
        (FORBIDS, {"__req__": 1}, "custom_params: the key '__req__' is the server's own"),
        (json.dumps({"name": "x" * 1000}), None, "has 1012 bytes, this server takes at most 1000"),
        (
            json.dumps([{"processor": {"name": "x" * 1000}}]),
            None,
            "has 1029 characters, this server takes at most 1000",
        ),
        ("[", None, "custom_logit_processor: is not JSON"),
        ("[]", None, f"the list must have 1 to {MAX_PROCESSORS} processors, not 0"),
        (json.dumps(["module.function"]), None, "callables by name are not taken inside SGLang"),
        (json.dumps([{"process": FORBIDS}]), None, "logits_processors[0]"),
    ],
)
def test_malformed_fields_are_refused(string: str, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        with_params(read_processors(string, 1000), params)


def test_sampling_params() -> None:
    """Some have values that only SGLang accepts. Processors see them; a request does not end for them."""
    params = sampling_params(Job("x", tokens=9, stop=(4,)))
    params.stop_strs, params.stop_regex_strs, params.logit_bias = "end", ["a+", "b"], {"3": 1e300}
    params.repetition_penalty = 0.001
    seen = sampling_params_of(params, (), frozenset({1}))
    assert (seen.max_tokens, seen.top_k, seen.repetition_penalty) == (9, -1, 0.001)
    assert (seen.stop, seen.stop_regex, seen.logit_bias) == (("end",), ("a+", "b"), {3: 1e300})
    assert (seen.stop_token_ids, seen.eos_token_ids) == ({4}, {1})
    params.stop_strs = [""]
    assert sampling_params_of(params, (), frozenset()).stop == ("",)
