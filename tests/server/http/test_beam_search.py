from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.server.requests.messages import BeamSearch
from tests.helpers.answers import error_of

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 6}
TREE = {"start_token_id": 7, "end_token_id": 1, "prefix_dict": {"7": [10, 11], "7_10": [], "7_11": [12], "7_11_12": []}}
INSTALLED = {"custom_logit_processor": {"name": "tree"}, "custom_params": {"tree": TREE}}


@pytest.fixture
def beams(make_engine: Callable[..., Any], make_client: Callable[[Any], Any]) -> Any:
    """A client of an app on the real engine."""
    return make_client(make_engine(max_num_seqs=6))


@pytest.mark.parametrize(
    ("fields", "n", "search"),
    [
        ({"use_beam_search": True, "n": 3}, 3, BeamSearch(3)),
        ({"use_beam_search": True}, 1, BeamSearch(1)),
        ({"num_beams": 4}, 1, BeamSearch(4)),
        ({"num_beams": 4, "num_return_sequences": 2}, 2, BeamSearch(4)),
        ({"num_beams": 4, "n": 2, "num_return_sequences": 2}, 2, BeamSearch(4)),
        ({"num_beams": 2, "length_penalty": 0.5, "early_stopping": "never"}, 1, BeamSearch(2, 0.5, "never")),
        ({"num_beams": 2, "length_penalty": 0, "early_stopping": True}, 1, BeamSearch(2, 0.0, True)),
        ({"num_beams": 2, "temperature": 0}, 1, BeamSearch(2)),
        ({"num_beams": 1, "num_return_sequences": 2}, 2, None),
        ({"use_beam_search": False, "length_penalty": 1, "early_stopping": False}, 1, None),
    ],
)
def test_fields_on_both_apis(client: Any, engine: Any, fields: dict[str, Any], n: int, search: Any) -> None:
    client.ok(COMPLETIONS, {**BODY, **fields})
    client.ok(CHAT, {"messages": [{"role": "user", "content": "x"}], **fields})
    client.ok(GENERATE, {"text": "x", "sampling_params": fields})
    for request in engine.requests:
        assert (request.n, request.beam_search) == (n, search)
        assert request.sampling_params.temperature == (fields.get("temperature", 1.0) if search is None else 0)
        mode = "raw_logprobs" if search is None else "processed_logprobs"
        assert request.sampling_params.logprobs_mode == mode


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"num_beams": 0}, "num_beams", "1 or greater"),
        ({"num_beams": "2"}, "num_beams", "1 or greater"),
        ({"num_beams": 40}, "num_beams", "runs at most 32 sequences"),
        ({"use_beam_search": True, "n": 40}, "n", "runs at most 32 sequences"),
        ({"num_beams": 2, "n": 3}, "n", "num_beams, which is 2"),
        ({"num_return_sequences": 2, "n": 3}, "num_return_sequences", "not the same as n"),
        ({"num_return_sequences": 70000}, "num_return_sequences", "must be at most 65536"),
        ({"num_return_sequences": 0}, "num_return_sequences", "1 or greater"),
        ({"num_return_sequences": 60000}, "num_return_sequences", "asks for 60000 continuations"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences", "num_beams, which is 2"),
        ({"num_return_sequences": 40, "use_beam_search": True}, "num_return_sequences", "runs at most 32 sequences"),
        ({"num_return_sequences": 2, "n": 2.0}, "num_return_sequences", "not the same as n"),
        ({"num_return_sequences": 1, "n": True}, "num_return_sequences", "not the same as n"),
        ({"num_return_sequences": 1.5}, "num_return_sequences", "1 or greater"),
        ({"num_return_sequences": 0, "n": 1}, "num_return_sequences", "1 or greater"),
        ({"num_return_sequences": 70000}, "num_return_sequences", "at most 65536"),
        ({"num_return_sequences": 200}, "num_return_sequences", "200 continuations"),
        ({"num_return_sequences": 40, "use_beam_search": True}, "num_return_sequences", "at most 32 sequences"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature", "no effect with beam search"),
        ({"num_beams": 2, "temperature": 1}, "temperature", "no effect with beam search"),
        ({"num_beams": 2, "top_k": 5}, "top_k", "no effect with beam search"),
        ({"num_beams": 2, "min_p": 0.5}, "min_p", "no effect with beam search"),
        ({"num_beams": 2, "top_p": 0.5}, "top_p", "no effect"),
        ({"num_beams": 2, "length_penalty": 11}, "length_penalty", "from -10 to 10"),
        ({"num_beams": 2, "early_stopping": "always"}, "early_stopping", "never"),
        ({"length_penalty": 2}, "length_penalty", "needs beam search"),
        ({"num_return_sequences": 2, "length_penalty": 2}, "length_penalty", "num_beams above 1, or "),
        ({"length_penalty": 2}, "length_penalty", "num_beams above 1, or "),
        ({"early_stopping": True}, "early_stopping", "needs beam search"),
        ({"num_beams": 1, "early_stopping": "never"}, "early_stopping", "needs beam search"),
    ],
)
def test_refusals_on_both_apis(client: Any, fields: dict[str, Any], param: str, says: str) -> None:
    for path, body, at in (
        (COMPLETIONS, {**BODY, **fields}, ""),
        (GENERATE, {"text": "x", "sampling_params": fields}, "sampling_params."),
    ):
        error = error_of(client.post(path, body))
        assert error["param"] == f"{at}{param}"
        assert says in error["message"]


def test_incompatible_fields(client: Any) -> None:
    for path, body, param in (
        (COMPLETIONS, {**BODY, "num_beams": 2, "stream": True}, "stream"),
        (COMPLETIONS, {**BODY, "use_beam_search": True, "stream": True}, "stream"),
        (GENERATE, {"text": "x", "sampling_params": {"num_beams": 2}, "stream": True}, "stream"),
        (COMPLETIONS, {**BODY, "num_beams": 2, "best_of": 2}, "best_of"),
        (COMPLETIONS, {**BODY, "num_beams": 2, "logprobs": 1, "logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
        (COMPLETIONS, {**BODY, "num_beams": 2, "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {**BODY, "prompt": ["a"] * 9, "num_beams": 30}, "num_beams"),
        (GENERATE, {"text": ["a"] * 9, "sampling_params": {"num_beams": 30}}, "sampling_params.num_beams"),
    ):
        answer = client.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_batch_asks_for_the_beams_of_each_prompt(make_engine: Callable[..., Any], make_client: Any) -> None:
    client = make_client(make_engine(max_num_seqs=4, max_queued_requests=4))
    samplings = [{"max_new_tokens": 1}] * 4 + [{"max_new_tokens": 1, "num_beams": 4}]
    assert len(client.ok(GENERATE, {"text": ["a"] * 5, "sampling_params": samplings})) == 5
    error = error_of(client.post(GENERATE, {"text": ["a"] * 6, "sampling_params": [{}, *samplings]}))
    assert error["param"] == "sampling_params[5].num_beams"
    assert "asks for 9 continuations, this server takes at most 8" in error["message"]


def test_completions(beams: Any) -> None:
    body = {**BODY, "use_beam_search": True, "n": 3, "logprobs": 2, "return_token_ids": True, "seed": 5}
    answer = beams.ok(COMPLETIONS, body)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
    means = [sum(values) / len(values) for values in logprobs]
    assert means == sorted(means, reverse=True)
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    two = beams.ok(COMPLETIONS, {**BODY, "num_beams": 3, "num_return_sequences": 2})["choices"]
    assert [choice["text"] for choice in two] == [choice["text"] for choice in choices[:2]]


def test_multiple_prompts_and_chat(beams: Any) -> None:
    alone = [beams.ok(COMPLETIONS, {**BODY, "prompt": p, "num_beams": 2, "n": 2})["choices"] for p in ("a", "bc")]
    both = beams.ok(COMPLETIONS, {**BODY, "prompt": ["a", "bc"], "num_beams": 2, "n": 2})["choices"]
    assert [choice["text"] for choice in both] == [choice["text"] for one in alone for choice in one]
    chat = beams.ok(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "num_beams": 2, "n": 2})
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 2


def test_generate_returns_cumulative_logprob_and_score(beams: Any) -> None:
    sampling = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0}
    answers = beams.ok(GENERATE, {"text": "hello", "sampling_params": sampling, "return_logprob": True})
    for answer in answers:
        meta = answer["meta_info"]
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        assert meta["cumulative_logprob"] == pytest.approx(sum(logprobs))
        assert meta["beam_score"] == pytest.approx(sum(logprobs) / len(logprobs) ** 2)
    assert answers[0]["meta_info"]["beam_score"] >= answers[1]["meta_info"]["beam_score"]
    plain = beams.ok(GENERATE, {"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    assert "beam_score" not in plain["meta_info"]


def test_fewer_choices_if_processors_allow_fewer_sequences(beams: Any) -> None:
    body = {**BODY, **INSTALLED, "use_beam_search": True, "n": 4, "return_token_ids": True}
    choices = beams.ok(COMPLETIONS, body)["choices"]
    assert sorted(choice["token_ids"] for choice in choices) == [[10, 1], [11, 12, 1]]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [receipt["steps"] for choice in choices for receipt in choice["receipts"]] == [
        len(choice["token_ids"]) for choice in choices
    ]


def test_processors_get_the_parameters_of_beams(beams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a beam search, a choice has one tokenization: beams would find a text twice."""
    seen: list[Any] = []
    prepare = GrammarProcessor.prepare

    def recorded(self: GrammarProcessor, params: Any, model: Any) -> Any:
        seen.append(params)
        return prepare(self, params, model)

    monkeypatch.setattr(GrammarProcessor, "prepare", recorded)
    choice = ["yes", "no"]
    for fields in ({"num_beams": 2}, {}, {"use_beam_search": True, "n": 2}):
        answer = beams.ok(COMPLETIONS, {**BODY, "guided_choice": choice, **fields})
    assert [params.get("tokenization") for params in seen] == ["usual", None, "usual"]
    assert sorted(each["text"] for each in answer["choices"]) == ["no", "yes"]
