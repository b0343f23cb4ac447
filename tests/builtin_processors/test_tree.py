from __future__ import annotations

import copy
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.builtin_processors import MultiSequenceLogitsProcessor, TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import read_tree
from logitship.sampler.processors.executor import PREPARED_KEY
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow, ReadLogits

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "rtp_llm.json").read_text())
MODEL = ModelView(12, frozenset({2}), None)

LEFT_OUT = {
    "end_token_zero_quirk": "RTP-LLM takes the sequence for finished before its first token",
    "all_candidates_out_of_vocab_masks_everything": "no token is allowed in RTP-LLM; here the EOS token is",
    "batch_mismatch_raises": "a check of RTP-LLM's own caller: here, the rows are those of the parameters",
}
"""Recorded steps that differ here, and why."""


def tree_row(make_row: MakeRow, tree: TokenTree, output: list[int], state: dict[str, Any]) -> dict[str, Any]:
    return make_row({PREPARED_KEY: tree}, [1], output, state)


@pytest.mark.parametrize(
    "case", [case for case in RECORDED["tree"] if case["name"] not in LEFT_OUT], ids=lambda case: case["name"]
)
def test_recorded(case: dict[str, Any], make_row: MakeRow, recorded_logits: ReadLogits) -> None:
    tree = read_tree(case["config"] if isinstance(case["config"], dict) else json.loads(case["config"]))
    outputs: list[list[int]] = [[] for _ in range(case["num_sequences"])]
    states: list[dict[str, Any]] = [{} for _ in outputs]
    prompt = case["generate_config"]["input_length"]
    for step in case["steps"]:
        if step["op"] == "update":
            for output, tokens in zip(outputs, step["tokens"], strict=True):
                output += tokens[prompt + len(output) :] if "num_beams" in case["generate_config"] else tokens
        elif step["op"] == "reorder":
            outputs = [list(outputs[source]) for source in step["src"]]
            states = [copy.deepcopy(states[source]) for source in step["src"]]
        elif step["op"] == "process":
            logits, expected = recorded_logits(step["logits_in"]), recorded_logits(step["expect_logits"])
            first, end = step.get("rows_range", (0, len(logits)))
            rows = [tree_row(make_row, tree, *each) for each in zip(outputs, states, strict=True)]
            TreeLogitsProcessor()(logits[first:end], rows)
            assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "case",
    [case for case in RECORDED["flat"] if case["processor"] == "TreeLogitsProcessor"],
    ids=lambda case: case["name"],
)
def test_recorded_flat(case: dict[str, Any], make_row: MakeRow, recorded_logits: ReadLogits) -> None:
    logits = recorded_logits([case["input_logits"]])
    row = make_row({"tree": case["tree_config"]}, case["prompt_ids"], case["output_ids"])
    TreeLogitsProcessor()(logits, [row])
    assert torch.equal(logits, recorded_logits([case["expected_logits"]]))
    assert logits[0].isfinite().nonzero().flatten().tolist() == case["expected_allowed"]


@pytest.mark.parametrize(
    "case", [case for case in RECORDED["chain"] if case["tree_config"]], ids=lambda case: case["name"]
)
def test_recorded_chains(case: dict[str, Any], make_row: MakeRow, recorded_logits: ReadLogits) -> None:
    """The tree, then the processor for finished sequences. If the two disagree, no token is left.

    RTP-LLM gets the finished sequences as an argument; here, they follow from the output. The third recorded chain has
    a processor for recommendations, which does not come with logitship.
    """
    prompt, eos = case["generate_config"]["input_length"], case["eos_token_id"]
    (update,) = case["updates"]
    in_tree = [make_row({"tree": case["tree_config"]}, tokens[:prompt], tokens[prompt:]) for tokens in update]
    finished = [
        make_row({"eos_token_ids": [eos]}, [1], [eos] if is_finished else []) for is_finished in case["finished_mask"]
    ]
    logits = recorded_logits(case["logits_in"])
    MultiSequenceLogitsProcessor()(TreeLogitsProcessor()(logits, in_tree), finished)
    assert torch.equal(logits, recorded_logits(case["expect_logits"]))


def random_tree(generator: random.Random, vocab_size: int) -> TokenTree:
    mapping = {"0": generator.sample(range(vocab_size + 3), k=4)}
    for path in itertools.islice(mapping.copy(), 30):
        for token in mapping[path]:
            mapping[f"{path}_{token}"] = generator.sample(range(vocab_size + 3), k=generator.randrange(5))
    return TokenTree(mapping, start_token_id=0, end_token_id=generator.randrange(vocab_size))


def test_rows_with_different_trees(make_row: MakeRow) -> None:
    """Rows of a batch with removed tokens and forks equal each row alone, from the start."""
    generator = random.Random(0)
    processor = TreeLogitsProcessor()
    trees = [random_tree(generator, 12) for _ in range(3)]
    for _ in range(60):
        used = generator.choices(trees, k=5)
        outputs: list[list[int]] = [[] for _ in used]
        states: list[dict[str, Any]] = [{} for _ in used]
        for _ in range(6):
            logits = torch.randn(5, 12)
            expected = torch.full_like(logits, -torch.inf)
            for row, (tree, output) in enumerate(zip(used, outputs, strict=True)):
                place = tree.start
                for token in output:
                    place = tree.advance(place, token)
                allowed = tree.allowed(place, 12)
                expected[row, allowed] = logits[row, allowed]
            rows = [tree_row(make_row, *each) for each in zip(used, outputs, states, strict=True)]
            assert processor(logits, rows) is logits
            assert torch.equal(logits, expected)
            for row in range(5):
                if generator.random() < 0.2:
                    del outputs[row][generator.randrange(len(outputs[row]) + 1) :]
                else:
                    allowed = logits[row].isfinite().nonzero().flatten().tolist() or [5]
                    outputs[row].append(generator.choice([*allowed, *allowed, generator.randrange(12)]))
            if generator.random() < 0.2:
                used[1], outputs[1], states[1] = used[0], list(outputs[0]), copy.deepcopy(states[0])


def test_two_trees_on_one_sequence_intersect(make_row: MakeRow) -> None:
    state: dict[str, Any] = {}
    one, other = TokenTree({"225": [1, 2], "225_2": [3, 4]}), TokenTree({"225": [2, 3], "225_2": [4, 5]})
    processor = TreeLogitsProcessor()
    for output, left in (([], [2]), ([2], [4])):
        logits = torch.zeros(1, 12)
        for tree in (one, other):
            processor(logits, [tree_row(make_row, tree, output, state)])
        assert logits[0].isfinite().nonzero().flatten().tolist() == left


def test_step_only_follows_new_tokens(make_row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, read, advance = TokenTree({"225": [1]}), list[int](), TokenTree.advance

    def counting(self: TokenTree, place: Any, token: int) -> Any:
        read.append(token)
        return advance(self, place, token)

    monkeypatch.setattr(TokenTree, "advance", counting)
    state: dict[str, Any] = {}
    output = [1] * 1000
    for token in (2, 3):
        TreeLogitsProcessor()(torch.zeros(1, 12), [tree_row(make_row, tree, output, state)])
        del read[:]
        output.append(token)
    TreeLogitsProcessor()(torch.zeros(1, 12), [tree_row(make_row, tree, output, state)])
    assert read == [3]


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, 12)
    assert TreeLogitsProcessor()(logits, []) is logits
    assert TreeLogitsProcessor()(logits) is logits


def test_prepare() -> None:
    named = TokenTree({"225": [1]})
    processor = TreeLogitsProcessor({"cities": named})
    assert processor.prepare({"tree": "cities"}, MODEL) is named
    inline = processor.prepare({"tree": {"prefix_dict": {"7": [3]}, "start_token_id": 7, "other": None}}, MODEL)
    assert inline.candidates(inline.start).tolist() == [3]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "tree: missing from custom_params, expected the name of a tree, or an object with prefix_dict"),
        ({"tree": 5}, "tree: expected the name of a tree, or an object with prefix_dict, got 5"),
        ({"tree": None}, "tree: expected the name of a tree, or an object with prefix_dict, got None"),
        ({"tree": "towns"}, "tree: no tree is named 'towns'; those that the server loaded: cities, names"),
        ({"tree": {}}, "tree: prefix_dict: missing, expected an object of the tokens that may follow each path"),
        ({"tree": {"prefix_dict": {"225": [1.5]}}}, "tree: prefix_dict['225'][0]: expected an integer, got 1.5"),
        ({"tree": {"prefix_dict": {}, "sep": 1}}, "tree: sep: expected a string, got 1"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    processor = TreeLogitsProcessor({"names": TokenTree({}), "cities": TokenTree({})})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        processor.prepare(params, MODEL)


def test_refuses_name_without_loaded_trees() -> None:
    with pytest.raises(ValueError, match="those that the server loaded: none"):
        TreeLogitsProcessor().prepare({"tree": "cities"}, MODEL)
