from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.sampler.batch_processors.adapter import AdapterLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.plugins import PluginLoadError, load_plugin, load_plugins, resolve
from logitship.sampler.sampling_params import SamplingParams

MODULE = '''
from logitship.client import CustomLogitProcessor
from logitship.sampler.batch_processors.interface import LogitsProcessor

class Shift(LogitsProcessor):
    """Adds a number to every logit."""
    def __init__(self, vllm_config, device, is_pin_memory, by=1.0, *, sign=1):
        if vllm_config is None:
            raise ValueError("no configuration")
        self.by = by * sign
    def is_argmax_invariant(self):
        return True
    def update_state(self, batch_update):
        pass
    def apply(self, logits):
        return logits + self.by
    @classmethod
    def validate_params(cls, params):
        if params.extra_args and "shift" not in params.extra_args:
            raise ValueError("shift is missing")

class Outer:
    class Inner(Shift):
        pass

class Abstract(LogitsProcessor):
    pass

class Row(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits

def double(output_token_ids, logits):
    return logits * 2

class Times:
    def __init__(self, factor, tokenizer):
        self.factor, self.tokenizer = factor, tokenizer
    def __call__(self, prompt_token_ids, output_token_ids, logits):
        return logits * self.factor

number = 5
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an importable module with the source above."""
    (tmp_path / "my_plugins.py").write_text(MODULE)
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_plugins"
    sys.modules.pop("my_plugins", None)


@pytest.fixture
def entry_point(tmp_path: Path, module: str) -> Callable[[str, str], None]:
    """Installs a distribution's metadata: `entry_point("name", "module:Class")`."""

    def install(name: str, value: str) -> None:
        info = tmp_path / f"{name}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.logits_processors]\n{name} = {value}\n")

    return install


def make(spec: Any, vllm_config: Any = "config", tokenizer: Any = None) -> LogitsProcessor:
    return load_plugin(spec).make(vllm_config, torch.device("cpu"), False, tokenizer)


def test_module_and_class(module: str) -> None:
    assert make(f"{module}:Shift").apply(torch.zeros(1, 2)).tolist() == [[1.0, 1.0]]
    assert type(make(f"{module}:Outer.Inner")).__name__ == "Inner"


def test_class_object(module: str) -> None:
    cls = resolve(f"{module}:Shift")
    plugin = load_plugin(cls)
    assert plugin.target is cls
    assert plugin.name == "my_plugins:Shift"


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("qualname", ["my_plugins:Shift", "my_plugins.Shift"])
def test_constructor(module: str, qualname: str, as_text: bool) -> None:
    spec: Any = {"qualname": qualname, "args": [3.0], "kwargs": {"sign": -1}}
    processor = make(json.dumps(spec) if as_text else spec)
    assert processor.apply(torch.zeros(1, 1)).item() == -3.0


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("no_such_module:Shift", "no_such_module"),
        ("my_plugins:Missing", "Missing"),
        ("my_plugins:number", "an object of type int is not a logits processor"),
        ("broken_plugin:Shift", "no licence"),
        ("Shift", "not of the form 'module:Class'"),
        (":Shift", "not of the form"),
        ({"qualname": "my_plugins:Missing"}, "Missing"),
        ({"qualname": 5}, "expected 'qualname' (text)"),
        ({"qualname": "my_plugins:Shift", "arguments": []}, "expected 'qualname' (text)"),
        ({"qualname": "my_plugins:Shift", "args": {"by": 1}}, "expected 'qualname' (text)"),
        ({"qualname": "my_plugins:Row", "kwargs": {"by": 1}}, "takes no constructor arguments"),
        ("{nonsense", "not valid JSON"),
    ],
)
def test_load_error_names_plugin(module: str, spec: Any, reason: str) -> None:
    with pytest.raises(PluginLoadError) as caught:
        load_plugin(spec)
    assert str(caught.value).startswith("logits processor ")
    assert reason in str(caught.value)
    name = spec if isinstance(spec, str) else str(spec["qualname"])
    assert name in str(caught.value)


def test_constructor_error_names_plugin(module: str) -> None:
    with pytest.raises(PluginLoadError, match="my_plugins:Shift: ValueError: no configuration"):
        make("my_plugins:Shift", vllm_config=None)
    with pytest.raises(PluginLoadError, match=r"my_plugins:Abstract: TypeError: .*abstract"):
        make("my_plugins:Abstract")
    with pytest.raises(PluginLoadError, match=r"my_plugins:Shift: TypeError: .*unknown"):
        make({"qualname": "my_plugins:Shift", "kwargs": {"unknown": 1}})
    with pytest.raises(PluginLoadError, match=r"my_plugins:Times: .*factor"):
        make("my_plugins:Times")


def test_batch_processor_object_is_rejected(module: str) -> None:
    with pytest.raises(PluginLoadError, match="give its class"):
        load_plugin(make("my_plugins:Shift"))


def test_class_of_real_vllm_is_rejected() -> None:
    real = type("LogitsProcessor", (), {"__module__": "vllm.v1.sample.logits_processor.interface"})
    plugin = type("Mine", (real,), {"__module__": "mine"})
    with pytest.raises(PluginLoadError, match="mine:Mine: derives from the LogitsProcessor of the installed vLLM"):
        load_plugin(plugin)


def test_request_level_callables_run_on_every_request(module: str) -> None:
    tokenizer = object()
    for spec in ("my_plugins:double", {"qualname": "my_plugins:Times", "kwargs": {"factor": 2}}):
        processor = make(spec, tokenizer=tokenizer)
        assert isinstance(processor, AdapterLogitsProcessor)
        assert not processor.is_argmax_invariant()
        processor.update_state(BatchUpdate(2, [], [(row, SamplingParams(), [1], []) for row in range(2)], []))
        assert processor.apply(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_row_level_classes_run_on_request(module: str) -> None:
    assert load_plugin("my_plugins:Row").is_custom_logit_processor
    assert not load_plugin("my_plugins:Shift").is_custom_logit_processor
    assert not load_plugin("my_plugins:double").is_custom_logit_processor


def test_entry_points_load_first(module: str, entry_point: Callable[[str, str], None]) -> None:
    entry_point("shifting", f"{module}:Outer.Inner")
    names = [plugin.name for plugin in load_plugins([f"{module}:Shift"])]
    assert names == ["shifting = my_plugins:Outer.Inner", "my_plugins:Shift"]


def test_failing_entry_point(entry_point: Callable[[str, str], None]) -> None:
    entry_point("licensed", "broken_plugin:Shift")
    with pytest.raises(PluginLoadError, match=r"licensed = broken_plugin:Shift, of the installed package licensed"):
        load_plugins()


def test_only_batch_processors_validate_params(module: str) -> None:
    wrong = SamplingParams(extra_args={"other": 1})
    with pytest.raises(ValueError, match="shift is missing"):
        load_plugin("my_plugins:Shift").validate_params(wrong)
    load_plugin("my_plugins:double").validate_params(wrong)
    load_plugin("my_plugins:Row").validate_params(wrong)
