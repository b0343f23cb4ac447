"""`RowProcessor`: the same edits as by hand, without reading, and on stock SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship import LLM, CustomLogitProcessor, ProcessorSerializationError, Row, RowProcessor, SamplingParams
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import PickledProcessor, parse
from logitship.sampler.promised_logits.promise import Promise
from logitship.sampler.promised_logits.promised_memory import Source
from logitship.server.engine.async_engine import AsyncEngine

VOCAB = 12
INF = float("inf")


def request(**attributes: Any) -> dict[str, Any]:
    given = {"origin_input_ids": [1, 2], "output_ids": [3], "tokenizer": "the tokenizer", "eos_token_ids": {5, 4}}
    return {"__req__": SimpleNamespace(**given, **attributes), "word": 7}


def edited(edit: Callable[[Row], None], before: torch.Tensor) -> list[float]:
    """Return a row after an edit: with real logits, and as edits without reading."""
    real = before.clone()
    edit(Row(real, 1, request()))
    source = Source(*before.shape, before.clone)
    promised = Promise(source).take()
    edit(Row(promised, 1, request()))
    assert not source.was_read
    assert torch.equal(real[0], before[0])
    return list(real[1].tolist())


def doubled(row: Row) -> None:
    row.logits *= 2


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda row: row.forbid(2), {2: -INF}),
        (lambda row: row.forbid([2, 3]), {2: -INF, 3: -INF}),
        (lambda row: row.forbid({2, 3}), {2: -INF, 3: -INF}),
        (lambda row: row.forbid(range(2, 4)), {2: -INF, 3: -INF}),
        (lambda row: row.forbid(torch.tensor([2, 3])), {2: -INF, 3: -INF}),
        (lambda row: row.forbid(i for i in (2, 3)), {2: -INF, 3: -INF}),
        (lambda row: row.forbid([]), {}),
        (lambda row: row.bias([2, 3], 1.5), {2: 3.5, 3: 4.5}),
        (lambda row: row.bias(2, -1), {2: 1.0}),
        (lambda row: row.allow_only([2, 3]), {i: -INF for i in range(VOCAB) if i not in (2, 3)}),
        (lambda row: row.allow_only(2), {i: -INF for i in range(VOCAB) if i != 2}),
        (lambda row: row.allow_only([]), dict.fromkeys(range(VOCAB), -INF)),
        (lambda row: row.force(2), {i: -INF for i in range(VOCAB) if i != 2}),
        (lambda row: row.logits.mul_(2), {i: 2.0 * i for i in range(VOCAB)}),
        (doubled, {i: 2.0 * i for i in range(VOCAB)}),
        (lambda row: setattr(row, "logits", row.logits + 1), {i: i + 1.0 for i in range(VOCAB)}),
    ],
)
def test_edits_of_one_row_without_reading(edit: Callable[[Row], None], expected: dict[int, float]) -> None:
    before = torch.arange(float(VOCAB)).repeat(3, 1)
    assert edited(edit, before) == [expected.get(i, float(i)) for i in range(VOCAB)]


def test_what_is_forbidden_stays_forbidden() -> None:
    before = torch.full((2, VOCAB), -INF)
    assert edited(lambda row: row.allow_only([2]), before)[2] == -INF
    assert edited(lambda row: row.force(2), before)[2] == -INF


def test_history() -> None:
    params = request(state={"n": 1})
    row = Row(torch.zeros(1, VOCAB), 0, params)
    assert (row.prompt_ids, row.output_ids, row.tokenizer, row.vocab_size) == ([1, 2], [3], "the tokenizer", VOCAB)
    assert (row.eos_token_ids, row.state, row.params["word"]) == ([4, 5], {"n": 1}, 7)
    assert row.request is params["__req__"]


class EveryOther(RowProcessor):
    """Forces `params["token_id"]` in every other step, and forbids it in the others."""

    def edit(self, row: Row) -> None:
        row.state["steps"] = row.state.get("steps", 0) + 1
        if row.state["steps"] % 2:
            row.force(row.params["token_id"])
        else:
            row.forbid(row.params["token_id"])


@pytest.mark.parametrize("isolation", ["none", "sandbox"])
def test_runs_in_the_server(make_engine: Callable[..., AsyncEngine], isolation: str) -> None:
    llm = LLM._from_engine(make_engine(processor_isolation=isolation))
    source = (
        "from logitship import Row, RowProcessor\n"
        "class FromSource(RowProcessor):\n"
        "    def edit(self, row: Row) -> None:\n"
        "        row.force(60 + len(row.output_ids))\n"
    )
    for processor, expected in [
        (EveryOther, [99, None, 99, None]),
        ({"source": source, "class_name": "FromSource"}, [60, 61, 62, 63]),
    ]:
        params = SamplingParams(
            max_tokens=4, custom_logit_processor=processor, custom_params={"token_id": 99}, ignore_eos=True
        )
        for output in llm.generate(["hello", "hi"], params, use_tqdm=False):
            tokens = output.outputs[0].token_ids
            assert [token if wanted else None for token, wanted in zip(tokens, expected, strict=True)] == expected
            assert tokens.count(99) == expected.count(99)


def test_edit_is_required() -> None:
    class Unfinished(RowProcessor):
        pass

    with pytest.raises(ProcessorSerializationError, match="Unfinished is abstract: it lacks edit"):
        Unfinished.to_str()


def test_pickle_and_source_need_nothing_of_logitship() -> None:
    string = parse(EveryOther.to_str())
    assert isinstance(string, PickledProcessor)
    assert string.source is not None
    assert "logitship" not in string.source.source.replace("logitship.client", "")
    for form in (string, string.source):
        cls: Any = load_class(form)
        assert issubclass(cls, CustomLogitProcessor)
        assert not issubclass(cls, RowProcessor)
        params = request(state={}) | {"token_id": 3}
        logits = cls()(torch.zeros(1, VOCAB), [params])
        assert logits[0].isfinite().nonzero().tolist() == [[3]]


STOCK = """
import json, sys
from types import SimpleNamespace
sys.path.insert(0, {peers!r})
import torch
import sglang_peer
peer = sglang_peer.load()
processor = peer.custom_logit_processor.CustomLogitProcessor.from_str(sys.stdin.read())
rows = [{{"__req__": SimpleNamespace(output_ids=[]), "token_id": token_id}} for token_id in (3, 5)]
step = peer.step([(processor, [0, 1])], rows)
seen = []
for _ in range(3):
    logits = torch.zeros(2, 8)
    step(logits)
    seen.append([[i for i, value in enumerate(row) if value == 0] for row in logits.tolist()])
assert not any(name.partition(".")[0] == "logitship" for name in sys.modules)
json.dump(seen, sys.stdout)
"""


@pytest.mark.slow
def test_string_runs_on_stock_sglang(tmp_path: Path) -> None:
    program = STOCK.format(peers=str(Path(__file__).parents[1] / "peers"))
    result = subprocess.run(
        [sys.executable, "-c", program], input=EveryOther.to_str(), cwd=tmp_path, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    others = [[i for i in range(8) if i != token_id] for token_id in (3, 5)]
    assert json.loads(result.stdout) == [[[3], [5]], others, [[3], [5]]]
