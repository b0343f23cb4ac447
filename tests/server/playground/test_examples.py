"""The playground's examples."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.server.http.playground_routes import FOLDER
from logitship.server.tokenizer import Tokenizer

EXAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "examples" / "index.json").read_text())
BY_ID = {example["id"]: example for example in EXAMPLES}


def source_of(example: dict[str, Any]) -> str:
    return (FOLDER / "examples" / f"{example['id']}.py").read_text()


def class_name(example: dict[str, Any]) -> str:
    return "".join(part.title() for part in example["id"].split("_"))


def answer(url: str, example: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Send an example as the page does, and return the response."""
    chat = example["mode"] == "chat"
    prompt = {"messages": [{"role": "user", "content": example["prompt"]}]} if chat else {"prompt": example["prompt"]}
    body = {
        **prompt,
        "temperature": 0.7,
        "seed": 1,
        **example["sampling"],
        "custom_logit_processor": {"source": source_of(example), "class_name": class_name(example)},
        "custom_params": example["params"],
        "return_token_ids": True,
        **changes,
    }
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response: dict[str, Any] = httpx.post(url + path, json=body, timeout=120).json()
    return response


def text_of(answered: dict[str, Any]) -> str:
    choice = answered["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_index_lists_all_files() -> None:
    files = {file.stem for file in (FOLDER / "examples").glob("*.py")}
    assert set(BY_ID) == files
    assert len(BY_ID) == len(EXAMPLES)
    keys = {"id", "title", "about", "mode", "prompt", "params", "sampling"}
    assert all(set(example) == keys for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=BY_ID.keys())
def test_example_runs(example: dict[str, Any], tiny_server: str) -> None:
    answered = answer(tiny_server, example)
    if example["id"] == "broken":
        assert answered["error"]["type"] == "ProcessorFault"
        return
    (receipt,) = answered["choices"][0]["receipts"]
    assert receipt["name"] == class_name(example)
    assert receipt["steps"] == answered["usage"]["completion_tokens"]


@pytest.mark.parametrize("example", EXAMPLES, ids=BY_ID.keys())
def test_examples_are_batch_invariant(example: dict[str, Any], tokenizer: Tokenizer) -> None:
    cls = load_class(SourceProcessor(source_of(example), class_name(example)))
    histories = [[], [40], [40, 41, 40], [50, 51, 52, 50, 51]]
    if example["id"] == "one_of":  # outputs that the processor allows
        histories = [tokenizer.encode("positive", add_special_tokens=False)[:length] for length in (0, 1, 4, 8)]
    if example["id"] == "template":
        histories = [tokenizer.encode("At 12:30 from", add_special_tokens=False)[:length] for length in (0, 3, 5, 12)]
    if example["id"] == "broken":
        histories = histories[:2]
    torch.manual_seed(0)
    logits = torch.randn(len(histories), 260)

    def params(history: list[int]) -> dict[str, Any]:
        request = SimpleNamespace(
            output_ids=history, tokenizer=tokenizer.hf_tokenizer, vocab_size=260, eos_token_ids=frozenset({1}), state={}
        )
        return {**example["params"], "__req__": request}

    batched = instantiate(cls)(logits.clone(), [params(history) for history in histories])
    single = [
        instantiate(cls)(logits[row : row + 1].clone(), [params(history)]) for row, history in enumerate(histories)
    ]
    assert torch.equal(batched, torch.cat(single))


def test_lipogram(tiny_server: str) -> None:
    assert "e" not in text_of(answer(tiny_server, BY_ID["lipogram"])).lower()


def test_one_of(tiny_server: str) -> None:
    assert text_of(answer(tiny_server, BY_ID["one_of"])) in BY_ID["one_of"]["params"]["choices"]


def test_template(tiny_server: str) -> None:
    assert re.fullmatch(r"At \d\d:\d\d from platform \d\.", text_of(answer(tiny_server, BY_ID["template"])))


def test_uppercase(tiny_server: str) -> None:
    text = text_of(answer(tiny_server, BY_ID["uppercase"]))
    assert any(character.isupper() for character in text)
    assert not any(character.islower() for character in text)


def test_no_repeats(tiny_server: str) -> None:
    def repeats(**changes: Any) -> int:
        answered = answer(tiny_server, BY_ID["no_repeats"], max_tokens=120, **changes)
        pairs = list(itertools.pairwise(answered["choices"][0]["token_ids"]))
        return len(pairs) - len(set(pairs))

    assert repeats(custom_params={"size": 2}) == 0
    assert repeats(custom_logit_processor=None, custom_params=None) > 0


def test_length(tiny_server: str) -> None:
    biased = {"logit_bias": {"1": 50, "50": 30}}  # favors the EOS token, and full stops
    short = answer(tiny_server, BY_ID["length"], custom_logit_processor=None, custom_params=None, **biased)
    assert short["usage"]["completion_tokens"] == 1
    answered = answer(tiny_server, BY_ID["length"], **biased)
    assert answered["usage"]["completion_tokens"] > BY_ID["length"]["params"]["least"]
    assert answered["choices"][0]["finish_reason"] == "stop"


def test_second_choice(tiny_server: str) -> None:
    (choice,) = answer(tiny_server, BY_ID["second_choice"], trace={"top": 2})["choices"]
    for entry in choice["trace"]:
        ids = [candidate["token_id"] for candidate in entry["candidates"]]
        assert entry["token_id"] == ids[1]


def processed(id_: str, params: dict[str, Any], vocabulary: list[str], output_ids: list[int]) -> torch.Tensor:
    """Apply an example to the logits 1, 2, 3 and so on."""
    example = BY_ID[id_]
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=lambda ids: [vocabulary[i] for i in ids],
        encode=lambda text, add_special_tokens: [vocabulary.index(text.replace(" ", "Ġ"))],
    )
    request = SimpleNamespace(
        output_ids=output_ids, tokenizer=tokenizer, vocab_size=len(vocabulary), eos_token_ids=frozenset({0}), state={}
    )
    processor = instantiate(load_class(SourceProcessor(source_of(example), class_name(example))))
    logits = torch.arange(1.0, len(vocabulary) + 1).unsqueeze(0)
    return processor(logits, [{**params, "__req__": request}])[0]


WORDS = ["</s>", "Ġsea", "sea", "ĠSun", "Ġmoon"]


def test_boost_words() -> None:
    boosted = processed("boost_words", {"words": ["sea", "moon"], "bias": 3}, WORDS, [])
    assert boosted.tolist() == [1, 5, 3, 4, 8]


def test_alliteration() -> None:
    assert processed("alliteration", {"letter": "s", "bias": 3}, WORDS, []).tolist() == [1, 5, 3, 7, 5]


@pytest.mark.parametrize(("length", "temperature"), [(0, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)])
def test_cooling(length: int, temperature: float) -> None:
    cooled = processed("cooling", {"start": 2.0, "end": 1.0, "steps": 4}, WORDS, [2] * length)
    assert cooled.tolist() == pytest.approx([value / temperature for value in range(1, 6)])
