"""Built-in processors on the real model, over HTTP."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from logitship import BadRequestError, Client, Generation, GenerationError
from logitship.server.model.default_model import default_model_folder
from logitship.server.tokenizer import Tokenizer

END = 2
"""SmolLM2's EOS token."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
BUDGET = 6
TOKENS = 60


@pytest.fixture
def client(real_server: str) -> Iterator[Client]:
    with Client(real_server, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(default_model_folder()))


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """A tree of 10,000 leaves, three tokens deep, each followed by the EOS token."""
    generator = random.Random(0)
    prefixes: dict[str, list[int]] = {}
    paths = ["225"]
    for width in (20, 20, 25):
        next_paths = []
        for path in paths:
            prefixes[path] = generator.sample(range(300, 40_000), width)
            next_paths += [f"{path}_{token}" for token in prefixes[path]]
        paths = next_paths
    assert len(paths) == 10_000
    prefixes |= {path: [END] for path in paths}
    return {"start_token_id": 225, "end_token_id": END, "prefix_dict": prefixes}


def of_tree(tree: dict[str, Any]) -> dict[str, Any]:
    return {"processor": {"name": "tree"}, "params": {"tree": tree}}


def of_grammar(**params: Any) -> dict[str, Any]:
    return {"processor": {"name": "grammar"}, "params": params}


def of_budget() -> dict[str, Any]:
    return {"processor": {"name": "thinking_budget"}, "params": {"thinking_budget": BUDGET}}


def check_path(output_ids: Sequence[int], tree: dict[str, Any]) -> None:
    """Check that the output is a path from the root to the EOS token."""
    assert output_ids[-1] == END
    path = "225"
    for token in output_ids:
        assert token in tree["prefix_dict"][path]
        path += f"_{token}"


def check_json(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "green", "blue"}


def check_thinking(output_ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Check that a new line and the end of thinking follow the budget, and that the model then continues freely."""
    forced = tokenizer.encode("\n", add_special_tokens=False) + tokenizer.encode("</think>", add_special_tokens=False)
    end = forced[1:]
    closings = [i for i in range(len(output_ids)) if [*output_ids[i : i + len(end)]] == end]
    assert closings
    assert closings[0] <= BUDGET + 1
    assert len(output_ids) == TOKENS


THINKING_PROMPT = "What is two plus two?\n<think>\nThe question asks for"
JSON_PROMPT = "A person as JSON:\n"
TREE_PROMPT = "The next word is"


def test_thinking_budget_processor(client: Client, tokenizer: Tokenizer) -> None:
    answer = client.generate(
        THINKING_PROMPT, logits_processors=[of_budget()], max_new_tokens=TOKENS, temperature=0, ignore_eos=True
    )
    check_thinking(answer.output_ids, tokenizer)
    free = client.generate(THINKING_PROMPT, max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
    assert "</think>" not in free.text


def test_thinking_token_budget(client: Client, tokenizer: Tokenizer) -> None:
    answer = client.generate(
        THINKING_PROMPT,
        max_new_tokens=TOKENS,
        temperature=0,
        ignore_eos=True,
        thinking_token_budget=12,
    )
    assert "</think>" in tokenizer.decode(answer.output_ids[: 12 + 5])


def test_tree_of_10_000_leaves(client: Client, tree: dict[str, Any]) -> None:
    answers = client.generate(
        TREE_PROMPT, n=4, logits_processors=[of_tree(tree)], max_new_tokens=20, temperature=1.5, seed=3
    )
    for answer in answers:
        check_path(answer.output_ids, tree)
        assert [receipt.name for receipt in answer.receipts] == ["tree"]
    assert len({answer.output_ids for answer in answers}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema(temperature: float, client: Client) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answers = client.chat(
        [{"role": "user", "content": "Tell me about a person, as JSON."}],
        n=2,
        response_format=response_format,
        max_tokens=200,
        temperature=temperature,
        seed=1,
    )
    for answer in answers:
        assert answer.finish_reason is not None
        assert answer.finish_reason.kind == "stop"
        check_json(answer.text)


def test_processors_in_one_batch(client: Client, tokenizer: Tokenizer, tree: dict[str, Any]) -> None:
    kinds = {
        "thinking": (THINKING_PROMPT, [of_budget()]),
        "tree": (TREE_PROMPT, [of_tree(tree)]),
        "json": (JSON_PROMPT, [of_grammar(json_schema=SCHEMA)]),
        "free": ("Once upon a time", []),
    }
    # Three of each kind in random order, so that rows of one kind are not adjacent.
    names = [name for name, _ in itertools.product(kinds, range(3))]
    random.Random(1).shuffle(names)
    answers: list[Generation] = client.generate(
        [kinds[name][0] for name in names],
        logits_processors=[kinds[name][1] for name in names],
        extra_body={
            "sampling_params": [
                {
                    "max_new_tokens": 200 if name == "json" else TOKENS,
                    "temperature": 0.9,
                    "sampling_seed": index,
                    "ignore_eos": name == "thinking",
                }
                for index, name in enumerate(names)
            ]
        },
    )
    for name, answer in zip(names, answers, strict=True):
        if name == "thinking":
            check_thinking(answer.output_ids, tokenizer)
        elif name == "tree":
            check_path(answer.output_ids, tree)
        elif name == "json":
            check_json(answer.text)


def test_tool_call_in_free_text(client: Client) -> None:
    """The output includes the special tokens of the chat template."""
    call = {
        "type": "tag",
        "begin": '<tool_call>{"name": "register", "arguments": ',
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "}</tool_call>",
    }
    tags = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call], "at_least_one": True}
    begin = {"type": "const_string", "value": "<|im_start|>assistant\n"}
    answer = client.chat(
        [{"role": "user", "content": "Register Ann, 33, who likes red."}],
        response_format={"type": "structural_tag", "format": {"type": "sequence", "elements": [begin, tags]}},
        max_tokens=250,
        temperature=0,
        skip_special_tokens=False,
    )
    text = answer.text
    begun, _, rest = text.partition("<tool_call>")
    assert begun == "<|im_start|>assistant\n"
    for part in ("<tool_call>" + rest).split("<tool_call>")[1:]:
        value = json.loads(part.partition("</tool_call>")[0])
        assert value["name"] == "register"
        check_json(json.dumps(value["arguments"]))


def test_thinking_budget_before_grammar(client: Client) -> None:
    """The grammar starts after the thinking, which the budget ends."""
    answer = client.generate(
        THINKING_PROMPT,
        logits_processors=[of_grammar(json_schema=SCHEMA, after="</think>"), of_budget()],
        max_new_tokens=300,
        temperature=0,
    )
    thinking, _, text = answer.text.partition("</think>")
    assert len(thinking) < 200
    check_json(text)


def test_schema_applies_after_thinking(client: Client) -> None:
    answer = client.generate(
        THINKING_PROMPT, json_schema=json.dumps(SCHEMA), thinking_token_budget=12, max_new_tokens=300, temperature=0
    )
    thinking, _, text = answer.text.partition("</think>")
    assert 0 < len(thinking) < 200
    check_json(text)


def test_masks_intersect(client: Client, tokenizer: Tokenizer) -> None:
    answer = client.generate(
        JSON_PROMPT,
        logits_processors=[of_grammar(regex="[a-z]{1,20}"), of_grammar(regex="[g-t]+")],
        max_new_tokens=30,
        temperature=1.0,
        seed=5,
    )
    assert answer.text
    assert set(answer.text) <= set("ghijklmnopqrst")


def test_error_names_masks_that_leave_no_token(client: Client, tokenizer: Tokenizer) -> None:
    with pytest.raises(GenerationError, match=r"no token is left.*grammar, disallowed_tokens"):
        client.generate(
            JSON_PROMPT,
            logits_processors=[
                of_grammar(choice=["yes"]),
                {
                    "processor": {"name": "disallowed_tokens"},
                    "params": {
                        "token_ids": [
                            token
                            for token in range(len(tokenizer.hf_tokenizer))
                            if "yes".startswith(tokenizer.decode([token])) and tokenizer.decode([token])
                        ]
                    },
                },
            ],
            max_new_tokens=5,
        )


def test_invalid_params(client: Client) -> None:
    with pytest.raises(BadRequestError, match="tree: expected"):
        client.generate("a", logits_processors=[{"processor": {"name": "tree"}, "params": {"tree": 7}}])
    with pytest.raises(BadRequestError, match="thinking_budget: expected an integer"):
        client.generate(
            "a", logits_processors=[{"processor": {"name": "thinking_budget"}, "params": {"thinking_budget": "many"}}]
        )
    assert {"tree", "grammar", "thinking_budget", "gen_length"} <= {each.name for each in client.processors()}
