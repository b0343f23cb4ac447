"""The built-in versions of logits-processor-zoo's processors give the same answers as the originals."""

from __future__ import annotations

from typing import Any

import pytest

from logitship import LLM
from tests.end_to_end.test_zoo import CAPITAL, COLORS, FRUIT, ask, greedy

pytestmark = pytest.mark.timeout(900)  # the deterministic mode, on a machine that may be busy

# Name, the original's class, question, parameters.
REQUESTS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("gen_length", "GenLengthLogitsProcessor", COLORS, {"boost_factor": 20.0, "p": 1}),
    ("gen_length", "GenLengthLogitsProcessor", COLORS, {"boost_factor": 20.0, "complete_sentences": True}),
    ("gen_length", "GenLengthLogitsProcessor", CAPITAL, {"boost_factor": -100.0, "p": 0}),
    ("cite_from_prompt", "CiteFromPromptLogitsProcessor", COLORS, {"boost_factor": 100.0, "boost_eos": False}),
    ("cite_from_prompt", "CiteFromPromptLogitsProcessor", COLORS, {"conditional_boost_factor": 9.0}),
    ("force_last_phrase", "ForceLastPhraseLogitsProcessor", CAPITAL, {"phrase": "\n\nReferences:\n"}),
    ("multiple_choice", "MultipleChoiceLogitsProcessor", FRUIT, {"delimiter": ".", "boost_first_words": 0.1}),
    ("prevent_hallucination", "PreventHallucinationLogitsProcessor", CAPITAL, {"minp": 1.0, "tolerate": 0}),
    ("prevent_hallucination", "PreventHallucinationLogitsProcessor", COLORS, {"tolerate": 2}),
    (
        "trigger_phrase",
        "TriggerPhraseLogitsProcessor",
        CAPITAL,
        {"phrase": " Lyon, I think", "trigger_token_phrase": " Paris", "trigger_count": 2},
    ),
    (
        "trigger_phrase",
        "TriggerPhraseLogitsProcessor",
        CAPITAL,
        {"phrase": " (on the Seine)", "trigger_token_phrase": " Paris", "trigger_after": True},
    ),
    # The clock starts with the first step, when no time has passed.
    ("max_time", "MaxTimeLogitsProcessor", COLORS, {"max_time": 0.0}),
]

PREFIX = "logits_processor_zoo.transformers."


def test_same_answers_as_originals(zoo_llm: LLM) -> None:
    questions = [question for _, _, question, _ in REQUESTS]
    by_name = [greedy([{"processor": name, "params": params}]) for name, _, _, params in REQUESTS]
    originals = [greedy([{"qualname": PREFIX + cls, "kwargs": params}]) for _, cls, _, params in REQUESTS]
    asked = [CAPITAL, COLORS, FRUIT]
    answers = ask(zoo_llm, questions * 2 + asked, by_name + originals + [greedy([])] * len(asked))
    count = len(REQUESTS)
    plain = {question: answer.outputs[0].text for question, answer in zip(asked, answers[2 * count :], strict=True)}
    for (name, _, question, _), builtin, original in zip(
        REQUESTS, answers[:count], answers[count : 2 * count], strict=True
    ):
        assert builtin.outputs[0].text == original.outputs[0].text, name
        assert builtin.outputs[0].text != plain[question], name
        assert builtin.outputs[0].receipts[0].name == name


def test_run_order(zoo_llm: LLM) -> None:
    """The processor that ends the answer runs first, so that the one that waits for the end sees it."""
    shorter = {"processor": "gen_length", "params": {"boost_factor": 20.0, "p": 1}}
    phrase = {"processor": "force_last_phrase", "params": {"phrase": "\n\nReferences:\n"}}
    (answer,) = ask(zoo_llm, [COLORS], [greedy([shorter, phrase])])
    assert "\n\nReferences:\n" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_invalid_params(zoo_llm: LLM) -> None:
    for params, message in (
        ({"choices": ["1", "two words"]}, "choices: expected a string of one token, but 'two words' is 2 tokens"),
        ({"choices": ["1"], "choises": ["2"]}, "choises"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(zoo_llm, [FRUIT], [greedy([{"processor": "multiple_choice", "params": params}])])
