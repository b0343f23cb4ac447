from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import orjson
import pytest
import torch

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    RegisteredProcessor,
    SourceProcessor,
)
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from tests.sampler.conftest import Load

MODEL = ModelView(4, frozenset(), None)


def source(body: str) -> SourceProcessor:
    """Return the source of a class whose `__call__` has this body."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    header = "from logitship import CustomLogitProcessor\n\nclass Shipped(CustomLogitProcessor):\n"
    return SourceProcessor(f"{header}    def __call__(self, logits, custom_param_list=None):\n{lines}", "Shipped")


def run(body: str, rows: int = 2) -> torch.Tensor:
    executor = InProcessExecutor({}, MODEL)
    return executor.run(executor.load(source(body)), torch.zeros(rows, 4), [{"by": float(row)} for row in range(rows)])


def fault_of(body: str) -> ProcessorFault:
    with pytest.raises(ProcessorFault) as raised:
        run(body)
    assert raised.value.name == "Shipped"
    assert raised.value.digest.startswith("sha256:")
    assert orjson.loads(orjson.dumps(raised.value.message)) == raised.value.message
    return raised.value


def test_load_and_run() -> None:
    result = run("for row, params in enumerate(custom_param_list):\n    logits[row] += params['by']\nreturn logits")
    assert result.tolist() == [[0.0] * 4, [1.0] * 4]


def test_digest_is_that_of_the_running_code() -> None:
    string = SourceProcessor(source("return logits").source, "Shipped", captured=b"")
    other = PickledProcessor(b"of another Python", python="2.7", source=string)
    executor = InProcessExecutor({}, MODEL)
    loaded = executor.load(other)
    assert (loaded.digest, loaded.name) == (string.digest, "Shipped")
    assert loaded.executor is executor


def test_class_description_is_loaded() -> None:
    string = source("return logits")
    header = "class Shipped(CustomLogitProcessor):\n    'Does it.'\n    params_schema = {'type': 'object'}\n\n"
    described = string.source.replace("class Shipped(CustomLogitProcessor):\n", header)
    loaded = InProcessExecutor({}, MODEL).load(replace(string, source=described))
    assert (loaded.description, loaded.params_schema) == ("Does it.", {"type": "object"})
    assert InProcessExecutor({}, MODEL).load(string).description == ""


@pytest.mark.parametrize("string", [InstalledProcessor("min_p"), RegisteredProcessor("sha256:" + "0" * 64)])
def test_string_without_code_is_rejected(string: InstalledProcessor | RegisteredProcessor) -> None:
    with pytest.raises(ProcessorLoadError, match="ships no code"):
        InProcessExecutor({}, MODEL).load(string)


@pytest.mark.parametrize("error", ["KeyboardInterrupt()", "SystemExit(3)", "GeneratorExit()", "ValueError('no')"])
@pytest.mark.parametrize("where", ["raise {}", "class Shipped(Base):\n    def __init__(self): raise {}"])
def test_any_exception_while_loading_is_a_load_error(error: str, where: str) -> None:
    text = f"from logitship import CustomLogitProcessor as Base\n{where.format(error)}\n"
    text += "    def __call__(self, logits, custom_param_list=None): return logits\n" if "class" in where else ""
    with pytest.raises(ProcessorLoadError, match=error.partition("(")[0]):
        InProcessExecutor({}, MODEL).load(SourceProcessor(text, "Shipped"))


def test_unprintable_error_is_a_load_error() -> None:
    text = "class Mute(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise Mute\n"
    with pytest.raises(ProcessorLoadError):
        InProcessExecutor({}, MODEL).load(SourceProcessor(text, "Shipped"))


@pytest.mark.parametrize(
    "raises",
    [
        r"raise ValueError('\ud800')",
        r"raise ModuleNotFoundError(name='\ud800')",
        "from logitship.client.errors import ProcessorLoadError\nraise ProcessorLoadError('x' * 1_000_000)",
    ],
)
def test_load_error_message_is_valid_unicode(raises: str) -> None:
    with pytest.raises(ProcessorLoadError) as raised:
        InProcessExecutor({}, MODEL).load(SourceProcessor(raises, "Shipped"))
    assert len(orjson.dumps(str(raised.value))) < 4200


def test_metaclass_cannot_rename_processor() -> None:
    text = """
from logitship import CustomLogitProcessor
class Meta(type(CustomLogitProcessor)):
    @property
    def __name__(cls): return 5
class Shipped(CustomLogitProcessor, metaclass=Meta):
    def __call__(self, logits, custom_param_list=None): return logits
"""
    assert InProcessExecutor({}, MODEL).load(SourceProcessor(text, "Shipped")).name == "Shipped"


@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration"])
def test_any_exception_becomes_a_fault(error: str) -> None:
    fault = fault_of(f"raise {error}('because')")
    assert fault.kind == "exception"
    assert fault.message == f"processor Shipped raised {error}: because"
    assert f"raise {error}('because')" in fault.traceback
    assert "in_process_executor" not in fault.traceback


def test_exception_without_message() -> None:
    assert fault_of("raise ValueError").message == "processor Shipped raised ValueError"


def test_traceback_includes_called_functions() -> None:
    fault = fault_of("return logits.view(3, 7)")
    assert "return logits.view(3, 7)" in fault.traceback
    chained = fault_of("try:\n    {}['key']\nexcept KeyError as error:\n    raise ValueError('second') from error")
    assert "KeyError: 'key'" in chained.traceback
    assert "ValueError: second" in chained.traceback


@pytest.mark.parametrize("reason", ["raise KeyboardInterrupt", "return 1 / 0", "return None", "return ''.join(self)"])
def test_unprintable_error(reason: str) -> None:
    fault = fault_of(f"class Mute(Exception):\n    def __str__(self): {reason}\nraise Mute")
    assert fault.message.startswith("processor Shipped raised Mute: (its message cannot be shown: str() raised ")
    assert "raise Mute" in fault.traceback


def test_error_whose_attributes_raise() -> None:
    body = "class Odd(SyntaxError):\n    @property\n    def lineno(self): raise KeyboardInterrupt\nraise Odd('odd')"
    fault = fault_of(body)
    assert fault.message == "processor Shipped raised Odd: odd"
    assert fault.traceback.endswith("in __call__\n    raise Odd('odd')\nOdd: odd\n")


@pytest.mark.parametrize(
    "error",
    [
        "class Meta(type):\n    @property\n    def __name__(cls): 1 / 0\nclass Odd(Exception, metaclass=Meta): pass",
        "class Odd(Exception):\n    @property\n    def __traceback__(self): 1 / 0",
        "class Odd(Exception):\n    def __getattribute__(self, name): 1 / 0",
        "class Text(str):\n    def __len__(self): 1 / 0\n    encode = __len__\n"
        "class Odd(Exception):\n    def __str__(self): return Text()",
    ],
)
def test_error_that_raises_on_any_access(error: str) -> None:
    assert fault_of(f"{error}\nraise Odd").message == "processor Shipped raised Odd"


@pytest.mark.parametrize("name", ["5", "[]"])
def test_name_error_with_unusual_name(name: str) -> None:
    assert fault_of(f"raise NameError('odd', name={name})").message == "processor Shipped raised NameError: odd"


def test_long_errors_are_truncated() -> None:
    fault = fault_of("raise ValueError('start' + 'x' * 1_000_000 + 'end')")
    assert fault.message.startswith("processor Shipped raised ValueError: startxxx")
    assert fault.message.endswith("… (1000008 characters)")
    assert len(fault.message) < 4200
    assert len(fault.traceback) < 4200
    assert fault.traceback.endswith("xxxend\n")


def test_deep_recursion_is_truncated() -> None:
    fault = fault_of("return self(logits, custom_param_list)")
    assert fault.message.startswith("processor Shipped raised RecursionError")
    assert len(fault.traceback) < 4200


def test_invalid_unicode_is_escaped() -> None:
    fault = fault_of(r"raise ValueError('\ud800')")
    assert fault.message.endswith(r"ValueError: \ud800")
    assert orjson.dumps(fault.traceback)


def test_missing_global_is_explained(load: Load) -> None:
    module: dict[str, Any] = {"__name__": "__main__"}
    exec("class Shipped:\n    def __call__(self, logits, params):\n        return helper(logits)", module)
    processor = load(module["Shipped"](), "Shipped")
    with pytest.raises(ProcessorFault, match="'helper' was a global of the author's module and was not serialized"):
        InProcessExecutor({}, MODEL).run(processor, torch.zeros(1, 2), [{}])


def test_unbound_local_is_not_explained() -> None:
    fault = fault_of("x = y\ny = x\nreturn logits")
    assert fault.message.startswith("processor Shipped raised UnboundLocalError")
    assert "was not serialized" not in fault.message


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("None", "returned NoneType, not a tensor (a processor that edits in place must return the logits too)"),
        ("logits.tolist()", "returned list, not a tensor"),
        ("logits.numpy()", "returned ndarray, not a tensor"),
        ("logits[:1]", "returned shape [1, 4], expected [2, 4]"),
        ("logits[0]", "returned shape [4], expected [2, 4]"),
        ("logits.T", "returned shape [4, 2], expected [2, 4]"),
        ("logits.long()", "returned dtype torch.int64, expected a floating-point type"),
        ("logits > 0", "returned dtype torch.bool, expected a floating-point type"),
        ("logits.to('meta')", "returned a tensor on meta, expected cpu"),
        ("logits.to_sparse()", "returned a tensor of layout torch.sparse_coo, expected a dense one"),
        ("logits + 0j", "returned dtype torch.complex64, expected a floating-point type"),
        ("logits.resize_(1, 3)", "returned shape [1, 3], expected [2, 4]"),
        ("logits.t_()", "returned shape [4, 2], expected [2, 4]"),
        ("logits, logits", "returned tuple, not a tensor"),
        ("(row for row in logits)", "returned generator, not a tensor"),
    ],
)
def test_invalid_result_is_described(returned: str, found: str) -> None:
    fault = fault_of(f"return {returned}")
    assert fault.kind == "bad_result"
    assert fault.message == f"processor Shipped {found}"
    assert fault.traceback == ""


def test_tensor_subclass_is_accepted() -> None:
    body = (
        "import torch\nclass Trap(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, function, types, args=(), kwargs=None): raise RuntimeError('trapped')\n"
        "return (logits + 2).as_subclass(Trap)"
    )
    result = run(body)
    assert type(result) is torch.Tensor
    assert result.tolist() == [[2.0] * 4] * 2


def test_fake_tensor_is_rejected() -> None:
    fault = fault_of("import torch\nclass Sham:\n    __class__ = torch.Tensor\nreturn Sham()")
    assert fault.message == "processor Shipped returned Sham, not a tensor"


def test_async_call_is_rejected() -> None:
    text = source("return logits").source.replace("def __call__", "async def __call__")
    executor = InProcessExecutor({}, MODEL)
    with pytest.raises(ProcessorFault, match="returned a coroutine, not a tensor: __call__ must not be async"):
        executor.run(executor.load(SourceProcessor(text, "Shipped")), torch.zeros(1, 4), [{}])
    gc.collect()  # a coroutine that was never awaited would warn now


def test_replaced_storage_is_copied_back() -> None:
    assert run("import torch\nlogits.data = torch.full_like(logits, 3.0)\nreturn logits").tolist() == [[3.0] * 4] * 2


def test_callers_logits_stay_valid(load: Load) -> None:
    def spoil(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        result = logits + 1
        logits.resize_(1)
        logits.requires_grad_()
        return result

    logits = torch.zeros(2, 4)
    InProcessExecutor({}, MODEL).run(load(spoil, "Spoil"), logits, [{}, {}])
    assert logits.add_(1).tolist() == [[2.0] * 4] * 2


def test_torch_settings_are_restored() -> None:
    setting = "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
    setting += "torch.set_default_device('meta')\n"
    executor = InProcessExecutor({}, MODEL)
    for text in (f"{setting}{source('return logits').source}", source(f"{setting}return logits").source):
        executor.run(executor.load(SourceProcessor(text, "Shipped")), torch.zeros(1, 4), [{}])
        assert torch.is_grad_enabled()
        assert torch.zeros(1).dtype is torch.float32
        assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_float_types_are_cast(dtype: str) -> None:
    result = run(f"import torch\nreturn (logits + 1.5).to(torch.{dtype})")
    assert result.dtype == torch.float32
    assert result.tolist() == [[1.5] * 4] * 2


def test_returning_the_logits_themselves(load: Load) -> None:
    logits = torch.zeros(2, 4)
    assert InProcessExecutor({}, MODEL).run(load(lambda logits, params: logits, "Same"), logits, [{}, {}]) is logits


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("logits.T", [[0.0, 2.0], [1.0, 3.0]]),
        ("logits[:1].expand(2, 2)", [[0.0, 1.0]] * 2),
        ("logits.view_as(logits)", [[0.0, 1.0], [2.0, 3.0]]),
    ],
)
def test_overlapping_view_is_copied(returned: str, expected: list[list[float]], load: Load) -> None:
    """The caller copies the result into the logits, so the two must not overlap."""
    logits = torch.arange(4.0).view(2, 2)
    processor = load(eval(f"lambda logits, params: {returned}"), "View")
    result = InProcessExecutor({}, MODEL).run(processor, logits, [{}, {}])
    assert logits.copy_(result).tolist() == expected


def test_gradients_are_dropped(load: Load) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    executor = InProcessExecutor({}, MODEL)
    result = executor.run(load(lambda logits, params: logits + weight, "New"), torch.zeros(2, 4), [{}, {}])
    assert not result.requires_grad
    assert type(result) is torch.Tensor

    def in_place(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        return logits.copy_(weight.expand(2, 4))

    result = executor.run(load(in_place, "InPlace"), torch.zeros(2, 4), [{}, {}])
    assert not result.requires_grad
    assert result.tolist() == [[1.0] * 4] * 2


def test_fault_does_not_keep_processor_alive(load: Load) -> None:
    """Requests keep their faults, which must not reference tensors through a traceback."""
    made: list[weakref.ref[torch.Tensor]] = []

    def fail(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        copy = logits.clone()
        made.append(weakref.ref(copy))
        raise ValueError(copy.shape)

    with pytest.raises(ProcessorFault) as raised:
        InProcessExecutor({}, MODEL).run(load(fail, "Fail"), torch.zeros(2, 4), [{}, {}])
    gc.collect()
    assert raised.value.kind == "exception"
    assert made[0]() is None


def test_processor_cannot_forge_a_fault() -> None:
    """The server sets digest and kind, even if the processor raises a fault of its own."""
    body = "from logitship.client.errors import ProcessorFault\n"
    fault = fault_of(body + "raise ProcessorFault('mine', digest='', name='Other', kind='odd')")
    assert fault.kind == "exception"
    assert fault.message == "processor Shipped raised ProcessorFault: mine"
