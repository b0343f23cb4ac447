"""All processors of logits-processor-zoo, in both variants, on the default model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from logits_processor_zoo import transformers as zoo_transformers
from logits_processor_zoo import vllm as zoo_vllm

from logitship import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.timeout(900)  # the deterministic mode, on a machine that may be busy

VARIANTS = {"transformers": zoo_transformers, "vllm": zoo_vllm}

CAPITAL = "What is the capital of France?"
COLORS = "List three colors."
FRUIT = "Which one is a fruit?\n1. Chair\n2. Car\n3. Apple\n4. Stone\nAnswer with the number."

REFERENCES = "\n\nReferences:\n"
DONT_KNOW = "...I don't know actually.\n"

REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "shorter": ("GenLengthLogitsProcessor", COLORS, {"boost_factor": 20.0, "p": 1}),
    "longer": ("GenLengthLogitsProcessor", CAPITAL, {"boost_factor": -100.0, "p": 0}),
    "cite": ("CiteFromPromptLogitsProcessor", COLORS, {"boost_factor": 100.0, "boost_eos": False}),
    "last phrase": ("ForceLastPhraseLogitsProcessor", CAPITAL, {"phrase": REFERENCES}),
    "choice": ("MultipleChoiceLogitsProcessor", FRUIT, {"delimiter": ".", "boost_first_words": 0.1}),
    "hallucination": ("PreventHallucinationLogitsProcessor", CAPITAL, {"minp": 1.0, "tolerate": 0}),
    "trigger": (
        "TriggerPhraseLogitsProcessor",
        CAPITAL,
        {"phrase": " Lyon, I think", "trigger_token_phrase": " Paris"},
    ),
    "trigger after": (
        "TriggerPhraseLogitsProcessor",
        CAPITAL,
        {"phrase": " (on the Seine)", "trigger_token_phrase": " Paris", "trigger_after": True},
    ),
    "time": ("MaxTimeLogitsProcessor", COLORS, {"max_time": 0.0}),
}

MAX_TOKENS = 32


def greedy(processors: list[Any]) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logits_processors=processors)


def ask(llm: LLM, questions: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.chat([[{"role": "user", "content": text}] for text in questions], params, use_tqdm=False)


@pytest.fixture(scope="module")
def plain(zoo_llm: LLM) -> dict[str, RequestOutput]:
    """The answers without a processor, by question."""
    questions = [CAPITAL, COLORS, FRUIT]
    return dict(zip(questions, ask(zoo_llm, questions, [greedy([])] * 3), strict=True))


@pytest.fixture(scope="module")
def answers(zoo_llm: LLM) -> dict[tuple[str, str], RequestOutput]:
    """The outputs of all requests of both variants, in one call, with processors by name."""
    keys = [(variant, key) for key in REQUESTS for variant in VARIANTS]
    questions, params = [], []
    for variant, key in keys:
        name, question, kwargs = REQUESTS[key]
        questions.append(question)
        params.append(greedy([{"qualname": f"logits_processor_zoo.{variant}.{name}", "kwargs": kwargs}]))
    return dict(zip(keys, ask(zoo_llm, questions, params), strict=True))


@pytest.fixture(params=VARIANTS)
def answer(request: pytest.FixtureRequest, answers: dict[tuple[str, str], RequestOutput]) -> Callable[[str], Any]:
    """The output of a request in this variant."""

    def get(key: str) -> Any:
        (output,) = answers[request.param, key].outputs
        return output

    return get


Answer = Callable[[str], Any]
Plain = dict[str, RequestOutput]


def test_plain_answers(plain: Plain) -> None:
    assert plain[CAPITAL].outputs[0].text == "The capital of France is Paris."
    assert plain[COLORS].outputs[0].finish_reason == "length"
    assert plain[FRUIT].outputs[0].text not in {"1", "2", "3", "4"}


def test_gen_length_shortens(answer: Answer, plain: Plain) -> None:
    output = answer("shorter")
    assert output.finish_reason == "stop"
    assert len(output.token_ids) < MAX_TOKENS / 2
    assert output.text
    assert plain[COLORS].outputs[0].text.startswith(output.text)


def test_gen_length_lengthens(answer: Answer, plain: Plain) -> None:
    output = answer("longer")
    assert (output.finish_reason, len(output.token_ids)) == ("length", MAX_TOKENS)
    assert output.text.startswith(plain[CAPITAL].outputs[0].text)


def test_cite_from_prompt(answer: Answer, plain: Plain) -> None:
    prompt_token_ids = set(plain[COLORS].prompt_token_ids)
    assert answer("cite").text
    assert set(answer("cite").token_ids) <= prompt_token_ids
    assert not set(plain[COLORS].outputs[0].token_ids) <= prompt_token_ids


def test_force_last_phrase(answer: Answer, plain: Plain) -> None:
    assert answer("last phrase").text.startswith(plain[CAPITAL].outputs[0].text + REFERENCES)


def test_multiple_choice(answer: Answer) -> None:
    """The processor forces a choice at every step: users would request one token."""
    text = answer("choice").text
    assert len(text) == MAX_TOKENS
    assert set(text) <= set("1234")


def test_prevent_hallucination(answer: Answer) -> None:
    """No token is certain enough, so the first one is replaced; the phrase repeats when it has ended."""
    text = answer("hallucination").text
    assert text.startswith(DONT_KNOW)
    assert text.count(DONT_KNOW) > 1


def test_trigger_phrase(answer: Answer) -> None:
    text = answer("trigger").text
    assert text.startswith("The capital of France is Lyon, I think")


def test_trigger_phrase_after(answer: Answer) -> None:
    assert answer("trigger after").text.startswith("The capital of France is Paris (on the Seine)")


@pytest.mark.parametrize(("variant", "text"), [("transformers", "1"), ("vllm", "")])
def test_max_time(variant: str, text: str, answers: dict[tuple[str, str], RequestOutput]) -> None:
    """The time is up at once.

    In its first step, the Hugging Face variant mistakes the EOS token in a chat's prompt for a sampled one, and does
    not force another.
    """
    (output,) = answers[variant, "time"].outputs
    assert (output.text, output.finish_reason) == (text, "stop")


def test_receipts_name_the_processors(answers: dict[tuple[str, str], RequestOutput]) -> None:
    for (variant, key), answer in answers.items():
        (output,) = answer.outputs
        (receipt,) = output.receipts
        assert receipt.name == f"logits_processor_zoo.{variant}.{REQUESTS[key][0]}"
        assert receipt.steps >= len(output.token_ids)


def test_objects_equal_names(zoo_llm: LLM, answers: dict[tuple[str, str], RequestOutput]) -> None:
    """Each continuation has its own copy, so one object serves several concurrent requests."""
    tokenizer = zoo_llm.get_tokenizer()
    for variant, zoo in VARIANTS.items():
        own = {"batch_size": 1} if variant == "transformers" else {}
        phrase = zoo.ForceLastPhraseLogitsProcessor(phrase=REFERENCES, tokenizer=tokenizer, **own)
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=2, logits_processors=[phrase])
        expected = answers[variant, "last phrase"].outputs[0].text
        for answer in ask(zoo_llm, [CAPITAL, CAPITAL], [params, params]):
            assert [output.text for output in answer.outputs] == [expected, expected]


def test_run_order(zoo_llm: LLM) -> None:
    """The processor that ends the answer runs first, so that the one that waits for the end sees it."""
    prefix = "logits_processor_zoo.transformers."
    shorter = {"qualname": f"{prefix}GenLengthLogitsProcessor", "kwargs": REQUESTS["shorter"][2]}
    phrase = {"qualname": f"{prefix}ForceLastPhraseLogitsProcessor", "kwargs": {"phrase": REFERENCES}}
    (answer,) = ask(zoo_llm, [COLORS], [greedy([shorter, phrase])])
    assert REFERENCES in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_installed_for_all_requests(plain: Plain) -> None:
    phrase = {
        "qualname": "logits_processor_zoo.transformers:ForceLastPhraseLogitsProcessor",
        "kwargs": {"phrase": REFERENCES},
    }
    with LLM(max_model_len=256, max_num_seqs=2, seed=0, logits_processors=[phrase]) as llm:
        for answer in ask(llm, [CAPITAL] * 3, [greedy([])] * 3):
            assert answer.outputs[0].text.startswith(plain[CAPITAL].outputs[0].text + REFERENCES)
