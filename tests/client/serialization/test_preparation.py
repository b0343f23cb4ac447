"""`prepare`: once for each loaded class here, and by the first call where nobody knows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.loading import instantiate_prepared, load_class
from logitship.client.serialization.preparation import has_prepare
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor, parse

PEERS = Path(__file__).parents[2] / "peers"
AUTHOR = """
import json, sys
import torch
from logitship import CustomLogitProcessor

class Prepares(CustomLogitProcessor):
    def __init__(self):
        self.times = 0

    def prepare(self, tokenizer, vocab_size):
        self.times += 1
        self.table = torch.full((vocab_size,), float(len(tokenizer)))

    def __call__(self, logits, custom_param_list=None):
        return logits + self.table + self.times

class Inherits(Prepares):
    def prepare(self, tokenizer, vocab_size):
        super().prepare(tokenizer, vocab_size)
        self.table *= 2

class Calls(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits + self.table + self.times

class PreparesOnly(Calls):
    times = 0
    prepare = Prepares.prepare

json.dump({cls.__name__: cls.to_str() for cls in (Prepares, Inherits, PreparesOnly)}, sys.stdout)
"""
EXPECTED = {"Prepares": 4.0, "Inherits": 7.0, "PreparesOnly": 4.0}
"""Sums of the tokenizer's length, 3 (twice for one class), and the number of calls of `prepare`."""
STOCK = """
import json, sys
from types import SimpleNamespace
sys.path.insert(0, {peers!r})
import torch
import sglang_peer
peer = sglang_peer.load()
results = {{}}
for name, text in json.load(sys.stdin).items():
    results[name] = []
    for _ in range(2):  # SGLang makes an instance for each batch
        processor = peer.custom_logit_processor.CustomLogitProcessor.from_str(text)
        for _ in range(2):
            logits = torch.zeros(1, 2)
            peer.apply(logits, [(processor, [0])], [{{"__req__": SimpleNamespace(tokenizer="abc")}}])
            results[name].append(logits.tolist())
assert not any(name.partition(".")[0] == "logitship" for name in sys.modules)
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def strings(python: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("author")
    (folder / "author.py").write_text(AUTHOR)
    made: dict[str, str] = json.loads(python("author.py", cwd=folder))
    return made


@pytest.mark.slow
def test_first_call_prepares_on_stock_sglang(
    strings: dict[str, str], python: Callable[..., str], tmp_path: Path
) -> None:
    results = json.loads(python("-c", STOCK.format(peers=str(PEERS)), cwd=tmp_path, stdin=json.dumps(strings)))
    assert results == {name: [[[value, value]]] * 4 for name, value in EXPECTED.items()}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("form", ["pickle", "source"])
def test_prepared_once_when_it_is_created(strings: dict[str, str], name: str, form: str) -> None:
    string = parse(strings[name])
    assert isinstance(string, PickledProcessor)
    runnable: Any = string if form == "pickle" else string.source
    processor: Any = instantiate_prepared(load_class(runnable), "abc", 2)
    assert processor.times == 1
    for _ in range(2):
        assert processor(torch.zeros(1, 2), [{}]).tolist() == [[EXPECTED[name]] * 2]
    assert processor.times == 1


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("form", ["pickle", "source"])
def test_first_call_prepares_what_from_str_returns(strings: dict[str, str], name: str, form: str) -> None:
    string = parse(strings[name])
    assert isinstance(string, PickledProcessor)
    source = string.source
    assert source is not None
    text = strings[name]
    if form == "source":
        text = json.dumps({"source": source.source, "class_name": source.class_name})
    processor = CustomLogitProcessor.from_str(text)
    params = [{"__req__": SimpleNamespace(tokenizer="abc")}]
    for _ in range(2):
        assert processor(torch.zeros(1, 2), params).tolist() == [[EXPECTED[name]] * 2]


@pytest.mark.parametrize("name", EXPECTED)
def test_loaded_class_is_serialized_without_what_it_prepared(strings: dict[str, str], name: str) -> None:
    text = strings[name]
    for _ in range(2):
        processor = CustomLogitProcessor.from_str(text)
        processor(torch.zeros(1, 2), [{"__req__": SimpleNamespace(tokenizer="of the client")}])
        text = type(processor).to_str()
    string = parse(text)
    assert isinstance(string, PickledProcessor)
    prepared: Any = instantiate_prepared(load_class(string), "abc", 2)
    assert prepared(torch.zeros(1, 2), [{}]).tolist() == [[EXPECTED[name]] * 2]
    assert prepared.times == 1


def test_error_of_prepare_is_a_load_error() -> None:
    source = """
from logitship import CustomLogitProcessor
class Fails(CustomLogitProcessor):
    def prepare(self, tokenizer, vocab_size):
        return tokenizer.no_such_method()
    def __call__(self, logits, custom_param_list=None):
        return logits
"""
    with pytest.raises(ProcessorLoadError, match=r"Fails raised in prepare: AttributeError[\s\S]*no_such_method"):
        instantiate_prepared(load_class(SourceProcessor(source, "Fails")), "abc", 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("self, tokenizer, vocab_size", True),
        ("self, params, model", False),
        ("self", False),
        ("tokenizer, vocab_size", False),
    ],
)
def test_other_methods_of_this_name_are_left_alone(arguments: str, expected: bool) -> None:
    names: dict[str, Any] = {}
    exec(f"class Other:\n    def prepare({arguments}): pass\n", names)
    assert has_prepare(names["Other"]) is expected
