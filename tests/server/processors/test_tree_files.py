"""The operator's token trees: where they are found, and their effect on requests."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logitship.server.config import ServerConfig
from logitship.server.processors.tree_files import load_trees
from logitship.server.refusals import BadRequest, StartError
from logitship.server.requests.messages import GenerationRequest
from tests.helpers.engine_requests import BuildEngine, generate, generate_together, installed
from tests.helpers.engine_requests import request as any_request

END = 1
TREE: dict[str, Any] = {
    "start_token_id": 7,
    "end_token_id": END,
    "prefix_dict": {"7": [50, 60], "7_50": [51], "7_60": [61, 62], "7_50_51": [], "7_60_61": [END], "7_60_62": [END]},
}
PATHS = [[50, 51, END], [60, 61, END], [60, 62, END]]


@pytest.fixture
def tree_file(tmp_path: Path) -> Path:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TREE))
    return file


request = partial(any_request, prompt=[10, 11], max_tokens=6, seed=5, ignore_eos=False)


def tree_request(rid: str, tree: Any) -> GenerationRequest:
    return request(rid, processors=[installed("tree", tree=tree)])


async def test_named_tree(make_engine: BuildEngine, tree_file: Path) -> None:
    engine = make_engine(tree=f"numbers={tree_file}")
    wanted = [*(tree_request(str(i), "numbers") for i in range(3)), request("plain")]
    *in_tree, plain = await generate_together(engine, wanted)
    assert all(output.token_ids in PATHS for output in in_tree)
    assert [receipt.name for output in in_tree for receipt in output.receipts] == ["tree"] * 3
    assert plain.receipts == ()
    assert plain.token_ids not in PATHS


async def test_tree_in_the_request(make_engine: BuildEngine) -> None:
    engine = make_engine()
    other = {"start_token_id": 7, "end_token_id": END, "prefix_dict": {"7": [80], "7_80": [END]}}
    one, two = await generate_together(engine, [tree_request("one", TREE), tree_request("two", other)])
    assert one.token_ids in PATHS
    assert two.token_ids == [80, END]
    with pytest.raises(BadRequest, match="no tree is named 'numbers'; those that the server loaded: none") as refused:
        await generate(engine, tree_request("three", "numbers"))
    assert refused.value.param == "processors[0].params"


async def test_tree_for_all_requests(make_engine: BuildEngine, tree_file: Path) -> None:
    engine = make_engine(tree_decode_config=str(tree_file))
    forbidding = installed("disallowed_tokens", token_ids=[50, 61])
    wanted = [request("plain"), request("narrowed", processors=[forbidding])]
    plain, narrowed = await generate_together(engine, wanted)
    assert plain.token_ids in PATHS
    assert [receipt.name for receipt in plain.receipts] == ["tree"]
    assert narrowed.token_ids == [60, 62, END]
    assert [receipt.name for receipt in narrowed.receipts] == ["disallowed_tokens", "tree"]
    assert [receipt.steps for receipt in narrowed.receipts] == [3, 3]


async def test_forced_token_obeys_the_tree(make_engine: BuildEngine, tree_file: Path) -> None:
    """A forced token is sampled where the tree allows it; elsewhere the request ends with an error."""
    engine = make_engine(tree_decode_config=str(tree_file))
    within = installed("think_mode", max_thinking_tokens=1, end_think_token_ids=[60, 62])
    outside = installed("think_mode", max_thinking_tokens=1, end_think_token_ids=[9])
    wanted = [request("within", processors=[within]), request("outside", processors=[outside])]
    forced, ended = await generate_together(engine, wanted)
    assert forced.token_ids == [60, 62, END]
    assert ended.error.type == "NoTokenLeftError"
    assert "tree" in ended.error.message
    assert "think_mode" in ended.error.message


async def test_refusal_names_the_index_in_the_request(make_engine: BuildEngine, tree_file: Path) -> None:
    engine = make_engine(tree_decode_config=str(tree_file))
    with pytest.raises(BadRequest) as refused:
        await generate(engine, request(processors=[installed("disallowed_tokens")]))
    assert refused.value.param == "processors[0].params"


def test_search_path_of_the_file(tmp_path: Path, tree_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's folder first, as RTP-LLM does, then as a path."""
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder in (model, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "tree.json").write_text(json.dumps(TREE | {"start_token_id": 8}))

    def start(name: str) -> int:
        return load_trees(ServerConfig(model_path=str(model), tree_decode_config=name))[name].start_token_id

    assert start("tree.json") == 8
    (model / "tree.json").write_text(json.dumps(TREE | {"start_token_id": 9}))
    assert start("tree.json") == 9
    assert start(str(tree_file)) == 7
    assert start(os.path.relpath(tree_file)) == 7


@pytest.mark.parametrize("setting", ["tree", "tree_decode_config"])
def test_load_error_stops_the_start(setting: str, tmp_path: Path, make_engine: BuildEngine) -> None:
    file = tmp_path / "tree.json"
    value = f"cities={file}" if setting == "tree" else str(file)
    with pytest.raises(StartError, match=f"^{setting}: {file} cannot be read: No such file or directory"):
        make_engine(**{setting: value})
    file.write_text('{"prefix_dict": {"225": ["1"]}}')
    problem = r"holds no tree: prefix_dict\['225'\]\[0\]: expected an integer, got '1'$"
    with pytest.raises(StartError, match=f"^{setting}: {file} {problem}"):
        make_engine(**{setting: value})


def test_error_lists_the_paths_that_were_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(StartError, match=r"directory; tried model/tree.json and tree.json$"):
        load_trees(ServerConfig(model_path="model", tree_decode_config="tree.json"))


def test_error_lists_an_absolute_path_once(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"directory$"):
        load_trees(ServerConfig(model_path=str(tmp_path), tree_decode_config=str(tmp_path / "tree.json")))


@pytest.mark.parametrize("setting", ["tree", "tree_decode_config"])
def test_path_that_cannot_be_looked_up(setting: str) -> None:
    long = "x" * 300
    settings: dict[str, Any] = {setting: f"long={long}" if setting == "tree" else long}
    with pytest.raises(StartError, match=f"^{setting}: {long} cannot be read: File name too long"):
        load_trees(ServerConfig(**settings))


def test_no_trees_by_default() -> None:
    assert load_trees(ServerConfig()) == {}
