from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from logitship.server.requests.messages import FinishReason, TokenLogprobs
from tests.helpers.answers import error_of


def test_one_prompt(client: Any, engine: Any) -> None:
    answer = client.ok("/generate", {"text": "ab", "sampling_params": {"temperature": 0}})
    meta = answer.pop("meta_info")
    assert answer == {"text": "Hi!", "output_ids": [72, 105, 33, 0]}
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": engine.requests[0].rid,
        "finish_reason": {"type": "stop", "matched": 0},
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
    }


def test_put(client: Any) -> None:
    assert client.http.put("/generate", json={"text": "ab"}).json()["text"] == "Hi!"


def test_length(client: Any) -> None:
    answer = client.ok("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})
    assert answer["text"] == "Hi"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_default_max_tokens_is_reduced_to_the_model_length(client: Any, engine: Any) -> None:
    engine.model = replace(engine.model, max_model_len=512)
    client.ok("/generate", {"text": "a"})
    client.ok("/generate", {"text": "a", "sampling_params": {"max_new_tokens": None}})
    client.ok("/generate", {"text": "a" * 500})
    assert [request.sampling_params.max_new_tokens for request in engine.requests] == [128, None, 12]


def test_sampling_parameters_reach_the_engine(client: Any, engine: Any) -> None:
    sampling = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "stop": "END",
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"65": -1, "66": 2.5},
        "sampling_seed": 11,
        "custom_params": {"a": [1]},
        "logprobs_mode": "processed_logprobs",
        "allowed_token_ids": [65, 66],
        "bad_words": ["no"],
    }
    client.ok("/generate", {"text": "a", "sampling_params": sampling})
    params = engine.requests[0].sampling_params
    plain = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty")
    plain += ("presence_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens", "custom_params")
    plain += ("spaces_between_special_tokens", "logprobs_mode")
    assert {name: getattr(params, name) for name in plain} == {name: sampling[name] for name in plain}
    assert params.stop == ("END",)
    assert params.stop_token_ids == {5, 6}
    assert params.include_stop_str_in_output
    assert params.logit_bias == {65: -1.0, 66: 2.5}
    assert params.seed == 11
    assert params.allowed_token_ids == {65, 66}
    assert params.bad_words_token_ids == (tuple(b"no"), tuple(b" no"))


def test_null_is_the_default(client: Any, engine: Any) -> None:
    body = {
        "text": "a",
        "input_ids": None,
        "sampling_params": {"temperature": None, "stop": None, "n": None, "regex": None},
        "custom_logit_processor": None,
        "rid": None,
        "lora_path": None,
        "image_data": None,
        "stream": None,
    }
    client.ok("/generate", body)
    assert engine.requests[0].sampling_params.temperature == 1


def test_batch(client: Any, engine: Any) -> None:
    body = {"text": ["a", "bc"], "rid": "mine", "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]}
    answers = client.ok("/generate", body)
    assert [answer["text"] for answer in answers] == ["H", "Hi"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine_0", "mine_1"]
    assert [request.prompt_token_ids for request in engine.requests] == [[97], [98, 99]]


def test_batch_of_one_is_a_list(client: Any) -> None:
    assert [answer["text"] for answer in client.ok("/generate", {"input_ids": [[1]]})] == ["Hi!"]


def test_batch_with_lists(client: Any, engine: Any) -> None:
    body = {
        "input_ids": [[1], [2]],
        "rid": ["x", "y"],
        "return_logprob": [True, False],
        "top_logprobs_num": [2, 0],
        "logprob_start_len": [0, -1],
        "custom_logit_processor": [None, {"name": "disallowed_tokens"}],
    }
    first, second = client.ok("/generate", body)
    assert "output_token_logprobs" in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]
    assert [len(request.processors) for request in engine.requests] == [0, 1]
    assert [request.rid for request in engine.requests] == ["x", "y"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_start_len": [0, 9]}, "logprob_start_len[1]"),
        ({"logprob_start_len": 9}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": [0, -9]}, "top_logprobs_num[1]"),
        ({"return_logprob": True, "top_logprobs_num": -9}, "top_logprobs_num"),
        ({"token_ids_logprob": [[1], [-1]]}, "token_ids_logprob[1]"),
        ({"token_ids_logprob": [1, -1]}, "token_ids_logprob"),
        ({"sampling_params": [{}, {"n": 1, "temperature": -1}]}, "sampling_params[1].temperature"),
    ],
)
def test_refusals_of_a_batch_name_the_prompt(client: Any, fields: dict[str, Any], param: str) -> None:
    error = error_of(client.post("/generate", {"text": ["a", "b"], **fields}))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_seed_and_its_alias(client: Any, engine: Any) -> None:
    for sampling in ({"seed": 1}, {"sampling_seed": 1}, {"seed": 1, "sampling_seed": 1}):
        client.ok("/generate", {"text": "a", "sampling_params": sampling})
    assert [request.sampling_params.seed for request in engine.requests] == [1, 1, 1]
    error = error_of(client.post("/generate", {"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}))
    assert error["param"] == "sampling_params.seed"
    assert "differs from sampling_seed" in error["message"]


def test_n_gives_a_list_ordered_by_prompt(client: Any) -> None:
    answers = client.ok("/generate", {"text": ["a", "bc"], "rid": "r", "sampling_params": {"n": 2}})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 1, 2, 2]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert len(client.ok("/generate", {"text": "a", "sampling_params": {"n": 3}})) == 3


def test_stream_is_cumulative(client: Any) -> None:
    events = client.events("/generate", {"text": "a", "return_logprob": True})
    assert [event["text"] for event in events] == ["H", "Hi", "Hi!", "Hi!"]
    assert events[-1]["output_ids"] == [72, 105, 33, 0]
    assert [event["meta_info"]["finish_reason"] for event in events] == [None] * 3 + [{"type": "stop", "matched": 0}]
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2, 3, 4]
    assert "e2e_latency" not in events[0]["meta_info"]
    assert "index" not in events[0]


def test_stream_of_a_batch_is_indexed(client: Any) -> None:
    events = client.events("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2, "max_new_tokens": 2}})
    assert sorted(event["index"] for event in events) == [0, 0, 1, 1, 2, 2, 3, 3]
    last = {event["index"]: event["text"] for event in events}
    assert last == dict.fromkeys(range(4), "Hi")


def test_logprobs(client: Any) -> None:
    body = {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    meta = client.ok("/generate", body)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.5, 98, "b"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 98, "b"]]]
    assert meta["output_token_logprobs"] == [[-0.5, 72, "H"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 72, "H"], [-1.0, 73, "I"]]]
    assert meta["output_token_logprobs_length"] == 1


def test_first_returned_position_has_no_logprob(client: Any) -> None:
    body = {"text": "abc", "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 1}
    events = client.events("/generate", body)
    for event in events:
        assert event["meta_info"]["input_token_logprobs"] == [[None, 98, None], [-0.5, 99, None]]
        assert event["meta_info"]["input_top_logprobs"] == [None, [[-0.5, 99, None]]]


def test_minus_infinity(client: Any, engine: Any) -> None:
    entry = TokenLogprobs(72, -math.inf, 3, ((5, -0.1), (6, -math.inf)))
    script = engine.script
    engine.script = lambda request: [replace(chunk, logprobs=[entry]) for chunk in script(request)]
    meta = client.ok("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 2})["meta_info"]
    assert meta["output_token_logprobs"][0] == [-9999.0, 72, None]
    assert meta["output_top_logprobs"][0] == [[-0.1, 5, None], [-9999.0, 6, None]]


@pytest.mark.parametrize(("token_ids", "each"), [([5, 6], [[5, 6], [5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])])
def test_requested_tokens_of_prompts(client: Any, engine: Any, token_ids: Any, each: list[list[int]]) -> None:
    client.ok("/generate", {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": token_ids})
    assert [request.sampling_params.logprob_token_ids for request in engine.requests] == each


def test_requested_tokens(client: Any, engine: Any) -> None:
    entry = TokenLogprobs(72, -0.5, 1, (), ((5, -1.5), (6, -math.inf)))
    script = engine.script
    engine.script = lambda request: [
        replace(chunk, logprobs=[entry], prompt_logprobs=[entry, entry] * bool(chunk.prompt_logprobs))
        for chunk in script(request)
    ]
    body = {"text": "ab", "return_logprob": True, "token_ids_logprob": [5, 6], "logprob_start_len": 0}
    meta = client.ok("/generate", body)["meta_info"]
    assert meta["input_token_ids_logprobs"] == [None, [[-1.5, 5, None], [-9999.0, 6, None]]]
    assert meta["output_token_ids_logprobs"][0] == [[-1.5, 5, None], [-9999.0, 6, None]]


def test_output_logprobs_only(client: Any, engine: Any) -> None:
    meta = client.ok("/generate", {"text": "ab", "return_logprob": True})["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"][0] == [-0.5, 72, None]
    assert "output_top_logprobs" not in meta
    assert "output_token_ids_logprobs" not in meta
    assert engine.requests[0].sampling_params.prompt_logprobs is None


def test_no_logprobs_by_default(client: Any) -> None:
    body = {"text": "ab", "top_logprobs_num": 2, "logprob_start_len": 0}
    assert "output_token_logprobs" not in client.ok("/generate", body)["meta_info"]


def test_processor_with_parameters_and_receipt(client: Any, engine: Any) -> None:
    body = {
        "text": "a",
        "custom_logit_processor": '{"name": "disallowed_tokens"}',
        "sampling_params": {"custom_params": {"token_ids": [1]}},
    }
    meta = client.ok("/generate", body)["meta_info"]
    receipt = {"digest": "sha256:" + "1" * 64, "name": "Mine", "steps": 4, "milliseconds": 0.25, "forced_steps": 0}
    assert meta["receipts"] == [receipt]
    (processor,) = engine.requests[0].processors
    assert processor.string.name == "disallowed_tokens"
    assert processor.params == {"token_ids": [1]}


def test_several_processors_run_in_order(client: Any, engine: Any) -> None:
    processors = [{"name": "one"}, '{"name": "two"}']
    client.ok("/generate", {"text": "a", "custom_logit_processor": processors})
    client.ok("/generate", {"text": ["a", "b"], "custom_logit_processor": [processors, None]})
    names = [[processor.string.name for processor in request.processors] for request in engine.requests]
    assert names == [["one", "two"], ["one", "two"], []]


def test_shipped_processor(shipping_client: Any, shipping_engine: Any) -> None:
    forms = [{"callable": "80"}, {"source": "class A: ...", "class_name": "A"}, {"digest": "sha256:" + "a" * 64}]
    for form in forms:
        shipping_client.ok("/generate", {"text": "a", "custom_logit_processor": form})
    assert len(shipping_engine.requests) == 3


def test_parameters_without_a_processor(client: Any) -> None:
    client.ok("/generate", {"text": "a", "sampling_params": {"custom_params": {"a": 1}}})


def test_fault(client: Any, engine: Any, failing: Any) -> None:
    engine.script = failing
    error = error_of(client.post("/generate", {"text": "a", "rid": "r"}))
    assert error["type"] == "ProcessorFault"
    assert error["message"] == "the processor Bad raised ZeroDivisionError"
    assert error["traceback"] == "Traceback: 1/0"
    assert (error["name"], error["digest"]) == ("Bad", "sha256:" + "0" * 64)
    assert engine.closed == ["r"]


def test_fault_in_a_stream(client: Any, engine: Any, failing: Any) -> None:
    engine.script = failing
    first, last = client.events("/generate", {"text": "a"})
    assert first["meta_info"]["finish_reason"] is None
    assert last["text"] == "a"
    reason = last["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert reason["status_code"] == 400
    assert reason["err_type"] == "ProcessorFault"
    assert reason["traceback"] == "Traceback: 1/0"


def test_fault_ends_only_its_continuation(client: Any, engine: Any, failing: Any, text_script: Any) -> None:
    succeeding = text_script("ok")
    engine.script = lambda request: (failing if request.rid == "bad" else succeeding)(request)
    events = client.events("/generate", {"text": ["a", "b"], "rid": ["bad", "good"]})
    last = {event["index"]: event for event in events}
    assert last[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert last[1]["text"] == "ok"
    assert last[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}


def test_fault_in_a_batch_has_the_index(client: Any, engine: Any, failing: Any, text_script: Any) -> None:
    succeeding = text_script("ok")
    engine.script = lambda request: (failing if request.rid == "bad" else succeeding)(request)
    assert error_of(client.post("/generate", {"text": ["a", "b"], "rid": ["good", "bad"]}))["index"] == 1
    assert sorted(engine.closed) == ["bad", "good"]


def test_refusal_cancels_the_rest_of_the_batch(client: Any, engine: Any, refusal: Any) -> None:
    engine.refusals["c"] = refusal
    error = error_of(client.post("/generate", {"text": ["a", "b", "c", "d"], "rid": ["a", "b", "c", "d"]}))
    assert error["param"] == "sampling_params.temperature"
    assert sorted(engine.closed) == ["a", "b"]
    assert [request.rid for request in engine.requests] == ["a", "b"]


def test_cancelled_request_returns_partial_output(client: Any, engine: Any, failing: Any) -> None:
    def cancelled(request: Any) -> list[Any]:
        begin, end = failing(request)
        return [begin, replace(end, finish_reason=FinishReason("abort"))]

    engine.script = cancelled
    answer = client.ok("/generate", {"text": "a"})
    assert answer["text"] == "a"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["finish_reason"]["message"] == "Aborted"
