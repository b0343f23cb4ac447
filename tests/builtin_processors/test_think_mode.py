from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.builtin_processors import StrictThinkModeLogitsProcessor, ThinkModeLogitsProcessor
from logitship.builtin_processors.parts.string_contain import StringContainAutomaton
from logitship.builtin_processors.think_mode import ThinkLimit
from logitship.sampler.processors.executor import PREPARED_KEY
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow, ReadLogits

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "rtp_llm.json").read_text())
PROCESSORS = {"think_v1": ThinkModeLogitsProcessor, "think": StrictThinkModeLogitsProcessor}

REFUSED = {
    "end_id_out_of_vocab": "RTP-LLM raises in the middle of the request",
    "negative_budget_same_as_1": "RTP-LLM's Python layer refuses it, too",
    "run_negative_budget": "the same",
    "empty_end_ids": "thinking would never end",
    "run_no_end_ids": "the same",
    "mask_ids_out_of_vocab_skipped": "nothing can be forbidden that the model has not",
}
"""Recorded parameters that are refused here, and why. If they work, they are replayed nevertheless."""

LEFT_OUT = {
    "end_id_out_of_vocab": "see `test_marker_outside_the_vocabulary_is_refused`",
    "mask_ids_out_of_vocab_skipped": "see `test_marker_outside_the_vocabulary_is_refused`",
    "run_token_mismatch_trusted": "RTP-LLM assumes that the forced token was sampled although another one was; "
    "here the history decides, so that tokens can be removed: see `test_other_token_than_forced_is_sampled`",
    "row_count_mismatch_raises": "a check of RTP-LLM's own caller: here, the rows are those of the parameters",
}
"""Recorded cases that differ here, and why."""


def cases(section: str) -> list[Any]:
    return [
        pytest.param(section, case, id=f"{section}-{case['name']}")
        for case in RECORDED[section]
        if case["name"] not in LEFT_OUT
    ]


def limit_of(config: dict[str, Any]) -> ThinkLimit:
    """Return the result of `prepare` for recorded parameters, including those that it refuses."""
    budget, begin = config["max_thinking_tokens"], config.get("begin_think_token_ids")
    return ThinkLimit(
        config["in_think_mode"] and budget != 0,
        budget,
        StringContainAutomaton(tuple(config["end_think_token_ids"])),
        begin[0] if begin else None,
    )


def recorded_vocab(case: dict[str, Any]) -> int:
    sizes = {
        step["logits_in"]["vocab"] if isinstance(step["logits_in"], dict) else len(step["logits_in"][0])
        for step in case.get("steps", ())
        if step["op"] == "process"
    }
    return max(sizes, default=128_900)


@pytest.mark.parametrize(("section", "case"), [*cases("think_v1"), *cases("think")])
def test_recorded(section: str, case: dict[str, Any], make_row: MakeRow, recorded_logits: ReadLogits) -> None:
    """RTP-LLM gets new tokens and lengths as arguments; here, both follow from the output.

    Where a recording has a step without the updates before it, the output is as long as it says, with a token that is
    in no marker.
    """
    config = case["generate_config"]
    limit = limit_of(config)
    if case["name"] not in REFUSED:
        known = {name: value for name, value in config.items() if name != "input_length"}
        made = PROCESSORS[section]().prepare(known, ModelView(recorded_vocab(case), frozenset(), None))
        assert (made.is_on, made.max_tokens, made.marker) == (limit.is_on, limit.max_tokens, limit.marker)
        assert section == "think_v1" or made.begin == limit.begin
    assert limit.is_on == case["expect_created"]
    if not limit.is_on:
        logits = torch.randn(1, 10)
        row = make_row({PREPARED_KEY: limit}, [], [1] * 9)
        assert torch.equal(PROCESSORS[section]()(logits.clone(), [row]), logits)
        return
    replay(section, case, limit, make_row, recorded_logits)


def replay(
    section: str, case: dict[str, Any], limit: ThinkLimit, make_row: MakeRow, recorded_logits: ReadLogits
) -> None:
    prompt = case["generate_config"]["input_length"]
    is_beam = case["generate_config"].get("num_beams", 1) > 1
    outputs: list[list[int]] = [[] for _ in range(case["num_sequences"])]
    states: list[dict[str, Any]] = [{} for _ in outputs]
    untold = [0] * len(outputs)
    for step in case["steps"]:
        if step["op"] == "update":
            for output, tokens in zip(outputs, step["tokens"], strict=True):
                output += tokens[prompt + len(output) :] if is_beam else tokens[: step["num_new"]]
        elif step["op"] == "reorder":
            outputs = [list(outputs[source]) for source in step["src"]]
            states = [copy.deepcopy(states[source]) for source in step["src"]]
        elif step["op"] == "force_dfa_status":
            outputs = [list(limit.marker.pattern[:status]) for status in step["values"]]
            untold = list(step["values"])
        elif step["op"] == "committed_output_len":
            assert [len(output) for output in outputs] == [step["expect"]]
        elif step["op"] == "state":
            check_states(step["expect"], limit, outputs, untold)
        else:
            for row, total in enumerate(step["sequence_lengths"]):
                missing = max(0, total - prompt - len(outputs[row]))
                outputs[row] = [0] * missing + outputs[row]
                untold[row] += missing
            logits = recorded_logits(step["logits_in"])
            rows = [
                make_row({PREPARED_KEY: limit}, [7] * prompt, output, state)
                for output, state in zip(outputs, states, strict=True)
            ]
            PROCESSORS[section]()(logits, rows)
            assert torch.equal(logits, recorded_logits(step["expect_logits"]))


def check_states(
    expected: list[dict[str, Any]], limit: ThinkLimit, outputs: list[list[int]], untold: list[int]
) -> None:
    """Return the automaton's status. RTP-LLM's is ahead by the `pending` tokens, which were forced but not seen yet."""
    for recorded, output, more in zip(expected, outputs, untold, strict=True):
        status, ahead = 0, [*output, *recorded.get("pending", [])]
        for token in ahead:
            status = limit.marker.step(status, token)
        assert recorded["out_len"] == len(ahead) - more
        if recorded["dfa"] is not None:
            assert recorded["dfa"] == status
            finished = recorded["finished"] if "finished" in recorded else recorded["state"] == "AFTER_THINK"
            assert finished == limit.marker.is_finished(status)


def test_skipped_recordings_exist() -> None:
    names = {case["name"] for section in PROCESSORS for case in RECORDED[section]}
    assert names >= {*LEFT_OUT, *REFUSED}


@pytest.mark.parametrize("case", RECORDED["think_spec"], ids=lambda case: case["name"])
def test_recorded_drafts(case: dict[str, Any], make_row: MakeRow) -> None:
    """The history of a draft row is the sequence and the draft so far; RTP-LLM uses a copy of its state.

    Rows after a draft token that is not allowed are recorded as RTP-LLM's caller left them. They are not sampled from.
    """
    limit, output = limit_of(case["generate_config"]), list[int]()
    state: dict[str, Any] = {}
    for step in case["steps"]:
        if step["op"] == "update":
            output += step["tokens"][0]
        elif step["op"] == "spec":
            allowed = []
            for length in range(len(step["draft"]) + 1):
                logits = torch.zeros(1, step["vocab"])
                history = output + step["draft"][:length]
                StrictThinkModeLogitsProcessor()(logits, [make_row({PREPARED_KEY: limit}, [], history, state)])
                allowed.append(logits[0].isfinite().nonzero().flatten().tolist())
            cap = step["expect_cap"]
            for got, recorded in zip(allowed[: cap + 1], step["expect_rows_allowed"], strict=False):
                left_out = recorded["all_except"] if isinstance(recorded, dict) else None
                assert got == (recorded if left_out is None else sorted({*range(step["vocab"])} - {*left_out}))
            if cap < len(step["draft"]):
                assert step["draft"][cap] not in allowed[cap]
        else:
            check_states(step["expect"], limit, [output], [0])


@pytest.mark.parametrize(
    "case", [case for case in RECORDED["flat"] if "Think" in case["processor"]], ids=lambda case: case["name"]
)
def test_recorded_flat(case: dict[str, Any], make_row: MakeRow, recorded_logits: ReadLogits) -> None:
    logits = recorded_logits([case["input_logits"]])
    model = ModelView(len(logits[0]), frozenset(), None)
    limit = StrictThinkModeLogitsProcessor().prepare(case["args"], model)
    row = make_row({PREPARED_KEY: limit}, case["prompt_ids"], case["output_ids"])
    StrictThinkModeLogitsProcessor()(logits, [row])
    assert torch.equal(logits, recorded_logits([case["expected_logits"]]))
    assert logits[0].isfinite().nonzero().flatten().tolist() == case["expected_allowed"]


def test_marker_outside_the_vocabulary_is_refused() -> None:
    model = ModelView(12, frozenset(), None)
    with pytest.raises(ValueError, match=r"^end_think_token_ids: token id 99 is outside the vocabulary \(0 to 11\)$"):
        ThinkModeLogitsProcessor().prepare({"max_thinking_tokens": 1, "end_think_token_ids": [99]}, model)
    params = {"max_thinking_tokens": 5, "begin_think_token_ids": [70], "end_think_token_ids": [8]}
    with pytest.raises(ValueError, match=r"^begin_think_token_ids: token id 70 is outside the vocabulary"):
        StrictThinkModeLogitsProcessor().prepare(params, model)


def test_other_token_than_forced_is_sampled(make_row: MakeRow) -> None:
    """The marker is forced again until it is complete."""
    limit = ThinkLimit(True, 1, StringContainAutomaton((8, 9)), 7)
    forced = []
    for output in ([3], [3, 5], [3, 5, 8], [3, 5, 8, 5], [3, 5, 8, 5, 8, 9]):
        logits = torch.zeros(1, 12)
        StrictThinkModeLogitsProcessor()(logits, [make_row({PREPARED_KEY: limit}, [], output)])
        forced.append([token for token, value in enumerate(logits[0].tolist()) if value == 1.0])
    assert forced == [[8], [8], [9], [8], []]


def slow_think_mode(output: list[int], limit: ThinkLimit, is_strict: bool) -> tuple[int | None, set[int]]:
    """Return the forced token and the forbidden tokens, by scanning the whole output."""
    marker = list(limit.marker.pattern)
    is_closed = any(output[start : start + len(marker)] == marker for start in range(len(output) + 1))
    if not is_closed:
        matched = max(length for length in range(len(marker)) if output[len(output) - length :] == marker[:length])
        if len(output) >= limit.max_tokens - (not is_strict) or (is_strict and matched):
            return marker[matched], set()
    forbidden = {limit.begin} if is_strict and limit.begin is not None else set()
    return None, forbidden | ({marker[0]} if is_strict and is_closed else set())


@pytest.mark.parametrize("is_strict", [False, True])
def test_random_batches_against_a_slow_reference(is_strict: bool, make_row: MakeRow) -> None:
    """Sequences with different limits that grow, shrink and fork."""
    generator = random.Random(0)
    processor = StrictThinkModeLogitsProcessor() if is_strict else ThinkModeLogitsProcessor()
    for _ in range(60):
        limits = [
            ThinkLimit(
                True,
                generator.randrange(1, 12),
                StringContainAutomaton(tuple(generator.choices(range(3), k=generator.randrange(1, 4)))),
                generator.choice([None, 0, 3]),
            )
            for _ in range(4)
        ]
        outputs: list[list[int]] = [[] for _ in limits]
        states: list[dict[str, Any]] = [{} for _ in limits]
        for _ in range(12):
            logits = torch.randn(4, 5)
            expected = logits.clone()
            for row in range(4):
                forced, forbidden = slow_think_mode(outputs[row], limits[row], is_strict)
                expected[row, range(5) if forced is not None else sorted(forbidden)] = -torch.inf
                if forced is not None:
                    expected[row, forced] = 1.0
            rows = [make_row({PREPARED_KEY: limits[row]}, [0, 1], outputs[row], states[row]) for row in range(4)]
            assert processor(logits, rows) is logits
            assert torch.equal(logits, expected)
            for row in range(4):
                if generator.random() < 0.2:
                    del outputs[row][generator.randrange(len(outputs[row]) + 1) :]
                else:
                    outputs[row] += generator.choices(range(4), k=generator.randrange(1, 3))
            if generator.random() < 0.2:
                limits[1], outputs[1], states[1] = limits[0], list(outputs[0]), copy.deepcopy(states[0])


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, 12)
    assert ThinkModeLogitsProcessor()(logits, []) is logits
    assert ThinkModeLogitsProcessor()(logits) is logits


def byte_model() -> ModelView:
    """Each byte is a token."""
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [] if add_special_tokens else [*text.encode()])
    return ModelView(256, frozenset(), tokenizer)


@pytest.mark.parametrize(
    ("params", "marker"),
    [
        ({}, b"</think>\n\n"),
        ({"end_think_tag": None, "end_think_token_ids": None}, b"</think>\n\n"),
        ({"end_think_tag": "</t>"}, b"</t>"),
        ({"end_think_tag": r"</t>\n"}, b"</t>\n"),
        ({"end_think_token_ids": [1, 2]}, b"\x01\x02"),
    ],
)
@pytest.mark.parametrize("processor", [ThinkModeLogitsProcessor(), StrictThinkModeLogitsProcessor()])
def test_end_marker(processor: ThinkModeLogitsProcessor, params: dict[str, Any], marker: bytes) -> None:
    limit = processor.prepare({"max_thinking_tokens": 3, **params}, byte_model())
    assert limit == ThinkLimit(True, 3, StringContainAutomaton(tuple(marker)), None)


@pytest.mark.parametrize(
    ("params", "begin"),
    [
        ({}, None),
        ({"begin_think_tag": ""}, None),
        ({"begin_think_token_ids": []}, None),
        ({"begin_think_tag": "<think>"}, ord("<")),
        ({"begin_think_token_ids": [5, 6]}, 5),
    ],
)
def test_begin_marker(params: dict[str, Any], begin: int | None) -> None:
    limit = StrictThinkModeLogitsProcessor().prepare({"max_thinking_tokens": 3, **params}, byte_model())
    assert limit.begin == begin


@pytest.mark.parametrize("params", [{"max_thinking_tokens": 0}, {"max_thinking_tokens": 3, "in_think_mode": False}])
def test_switched_off(params: dict[str, Any]) -> None:
    assert not ThinkModeLogitsProcessor().prepare(params, byte_model()).is_on


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "max_thinking_tokens: missing from custom_params, expected an integer, 0 or greater"),
        ({"max_thinking_tokens": -5}, "max_thinking_tokens: expected an integer, 0 or greater, got -5"),
        ({"max_thinking_tokens": 1.0}, "max_thinking_tokens: expected an integer, 0 or greater, got 1.0"),
        ({"in_think_mode": 1}, "in_think_mode: expected true or false, got 1"),
        ({"end_think_token_ids": []}, "end_think_token_ids: expected at least one token, without any thinking would"),
        ({"end_think_tag": ""}, "end_think_tag: expected at least one token, without any thinking would"),
        ({"end_think_token_ids": "8"}, "end_think_token_ids: expected a list of token ids, got '8'"),
        ({"end_think_token_ids": [256]}, "end_think_token_ids: token id 256 is outside the vocabulary (0 to 255)"),
        ({"end_think_tag": 8}, "end_think_tag: expected a string, got 8"),
        (
            {"end_think_tag": "x", "end_think_token_ids": [8]},
            "end_think_tag: expected only one of this and end_think_token_ids",
        ),
        (
            {"begin_think_tag": "x", "begin_think_token_ids": [8]},
            "begin_think_tag: expected only one of this and begin_think_token_ids",
        ),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    given = {"max_thinking_tokens": 3, **params} if params else None
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        StrictThinkModeLogitsProcessor().prepare(given, byte_model())


def test_refuses_a_tag_without_tokens() -> None:
    model = ModelView(5, frozenset(), SimpleNamespace(encode=lambda text, add_special_tokens: []))
    with pytest.raises(
        ValueError, match=r"^end_think_tag: expected a string that the tokenizer knows, 'é' has no tokens$"
    ):
        ThinkModeLogitsProcessor().prepare({"max_thinking_tokens": 3, "end_think_tag": "é"}, model)
