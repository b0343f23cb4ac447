"""The operator's token trees: where they are found, and their effect on requests."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.processors.tree_files import load_trees
from logitship.server.refusals import BadRequest, StartError
from logitship.server.requests.messages import GenerationChunk, GenerationRequest, ProcessorRequest

BuildEngine = Callable[..., AsyncEngine]

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


def tree_request(rid: str, tree: Any) -> GenerationRequest:
    return request(rid, ProcessorRequest(InstalledProcessor("tree"), {"tree": tree}))


def request(rid: str, *processors: ProcessorRequest, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        rid=rid,
        prompt_token_ids=[10, 11],
        sampling_params=SamplingParams(**({"max_tokens": 6, "temperature": 1.0, "seed": 5} | params)),
        processors=processors,
    )


def run(engine: AsyncEngine, *wanted: GenerationRequest) -> list[tuple[list[int], GenerationChunk]]:
    async def tokens(each: GenerationRequest) -> tuple[list[int], GenerationChunk]:
        found: list[int] = []
        async for chunk in await engine.submit(each):
            found += chunk.token_ids
            last = chunk
        return found, last

    async def together() -> list[tuple[list[int], GenerationChunk]]:
        async with asyncio.timeout(120):
            return list(await asyncio.gather(*map(tokens, wanted)))

    return asyncio.run(together())


def test_named_tree(make_engine: BuildEngine, tree_file: Path) -> None:
    engine = make_engine(tree=f"numbers={tree_file}")
    *in_tree, (plain, last) = run(engine, *(tree_request(str(i), "numbers") for i in range(3)), request("plain"))
    assert all(tokens in PATHS for tokens, _ in in_tree)
    assert [receipt.name for _, chunk in in_tree for receipt in chunk.receipts] == ["tree"] * 3
    assert last.receipts == ()
    assert plain not in PATHS


def test_tree_in_the_request(make_engine: BuildEngine) -> None:
    engine = make_engine()
    other = {"start_token_id": 7, "end_token_id": END, "prefix_dict": {"7": [80], "7_80": [END]}}
    (one, _), (two, _) = run(engine, tree_request("one", TREE), tree_request("two", other))
    assert one in PATHS
    assert two == [80, END]
    with pytest.raises(BadRequest, match="no tree is named 'numbers'; those that the server loaded: none") as refused:
        run(engine, tree_request("three", "numbers"))
    assert refused.value.param == "processors[0].params"


def test_tree_for_all_requests(make_engine: BuildEngine, tree_file: Path) -> None:
    engine = make_engine(tree_decode_config=str(tree_file))
    forbidding = ProcessorRequest(InstalledProcessor("disallowed_tokens"), {"token_ids": [50, 61]})
    (plain, last), (narrowed, other) = run(engine, request("plain"), request("narrowed", forbidding))
    assert plain in PATHS
    assert [receipt.name for receipt in last.receipts] == ["tree"]
    assert narrowed == [60, 62, END]
    assert [receipt.name for receipt in other.receipts] == ["disallowed_tokens", "tree"]
    assert [receipt.steps for receipt in other.receipts] == [3, 3]


def test_forced_token_obeys_the_tree(make_engine: BuildEngine, tree_file: Path) -> None:
    """A forced token is sampled where the tree allows it; elsewhere the request ends with an error."""
    engine = make_engine(tree_decode_config=str(tree_file))
    within = ProcessorRequest(
        InstalledProcessor("think_mode"), {"max_thinking_tokens": 1, "end_think_token_ids": [60, 62]}
    )
    outside = ProcessorRequest(InstalledProcessor("think_mode"), {"max_thinking_tokens": 1, "end_think_token_ids": [9]})
    (forced, _), (_, ended) = run(engine, request("within", within), request("outside", outside))
    assert forced == [60, 62, END]
    assert ended.finish_reason is not None
    assert ended.finish_reason.error is not None
    assert ended.finish_reason.error.type == "NoTokenLeftError"
    assert "tree" in ended.finish_reason.error.message
    assert "think_mode" in ended.finish_reason.error.message


def test_refusal_names_the_index_in_the_request(make_engine: BuildEngine, tree_file: Path) -> None:
    engine = make_engine(tree_decode_config=str(tree_file))
    with pytest.raises(BadRequest) as refused:
        run(engine, request("a", ProcessorRequest(InstalledProcessor("disallowed_tokens"), {})))
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
