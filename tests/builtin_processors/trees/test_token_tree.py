from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from logitship.builtin_processors.trees.token_tree import Place, TokenTree
from logitship.builtin_processors.trees.token_tree_format import read_tree

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "rtp_llm.json").read_text())["tree"]

LEFT_OUT = {
    "end_token_zero_quirk": "RTP-LLM takes the sequence for finished before its first token; here it follows the tree",
    "partial_window_rejected": "a check of RTP-LLM's own caller: here, the tokens are the sequence's history",
}


def followed(tree: TokenTree, output: list[int]) -> Place:
    place = tree.start
    for token in output:
        place = tree.advance(place, token)
    return place


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_recorded_states(case: dict[str, Any]) -> None:
    """The logits of the same cases are in `test_tree.py`."""
    config = case["config"] if isinstance(case["config"], dict) else json.loads(case["config"])
    tree = read_tree(config)
    outputs: list[list[int]] = [[] for _ in range(case["num_sequences"])]
    prompt = case["generate_config"]["input_length"]
    for step in case["steps"]:
        if step["op"] == "update" and "expect_raises" not in step:
            for output, tokens in zip(outputs, step["tokens"], strict=True):
                # Of beams, the whole sequence is recorded.
                output += tokens[prompt + len(output) :] if "num_beams" in case["generate_config"] else tokens
        elif step["op"] == "reorder":
            outputs = [list(outputs[source]) for source in step["src"]]
        elif step["op"] == "state" and case["name"] not in LEFT_OUT:
            places = [followed(tree, output) for output in outputs]
            assert [
                {
                    "status": place.path,
                    "error": place.error,
                    "finished": place.finished,
                    "candidates": tree.candidates(place).tolist(),
                    "out_len": len(output),
                }
                for place, output in zip(places, outputs, strict=True)
            ] == [{k: v for k, v in each.items() if k not in ("input_len", "is_beam")} for each in step["expect"]]


def test_end_token_zero() -> None:
    tree = TokenTree({"7": [3, 4], "7_3": [5]}, start_token_id=7, end_token_id=0)
    assert not tree.start.finished
    assert tree.candidates(followed(tree, [3])).tolist() == [5]
    assert followed(tree, [3, 0]).finished


@pytest.mark.parametrize(
    ("candidates", "end_token_id", "allowed"),
    [
        ([3, 50], 2, [3]),
        ([50], 2, [2]),  # nothing at all in RTP-LLM
        ([], 2, [2]),
        ([50], 60, []),
        ([], -1, []),
        ([3], -1, [3]),
    ],
)
def test_candidates_outside_the_vocabulary(candidates: list[int], end_token_id: int, allowed: list[int]) -> None:
    tree = TokenTree({"225": candidates}, end_token_id=end_token_id)
    assert tree.allowed(tree.start, 12).tolist() == allowed


def test_random_trees_against_their_definition() -> None:
    """Reference implementation that only uses the mapping."""
    generator = random.Random(0)
    for _ in range(300):
        sep, end = generator.choice(["_", "", "--"]), generator.randrange(4)
        paths = {sep.join(map(str, [1, *generator.choices(range(4), k=generator.randrange(4))])) for _ in range(12)}
        mapping = {path: generator.choices(range(4), k=generator.randrange(4)) for path in sorted(paths)}
        tree = TokenTree(mapping, start_token_id=1, end_token_id=end, sep=sep)
        output = generator.choices(range(4), k=6)
        path, stuck, done = "1", False, False
        for token in output:
            following = path + sep + str(token)
            if not stuck and not done:
                done = token == end
                stuck = not done and following not in mapping
                path = path if stuck else following
        place = followed(tree, output)
        assert place == Place(path, done, stuck)
        expected = [end] if stuck or not mapping.get(path) else sorted(set(mapping[path]))
        assert tree.candidates(place).tolist() == expected


def test_copies_of_a_sequence_share_the_tree() -> None:
    tree = TokenTree({"225": [1]})
    assert copy.deepcopy({"tree": tree})["tree"] is tree
    assert copy.copy(tree) is tree
