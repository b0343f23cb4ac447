from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.server.processors.callable_library import CallableLibrary
from logitship.server.requests.messages import CallableRequest


class Unchanged:
    """A callable that takes any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, output_token_ids: list[int], logits: Any) -> Any:
        return logits


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [2**70, nested(300), {object(): 1}, "\ud800"], ids=["int", "list", "dict", "str"])
def test_digest_without_values_that_are_not_json(value: Any) -> None:
    library = CallableLibrary(None, None)
    made = library.make(CallableRequest(Unchanged, (), {"seed": value}))
    assert made.digest == library.make(CallableRequest(Unchanged, (value,))).digest
    assert made.digest != library.make(CallableRequest(Unchanged)).digest


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages, of which one exports what the other and the standard library define."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("exporting_package", "defining_package"):
        (tmp_path / name).mkdir()
    exporting, defining = (tmp_path / name / "procs.py" for name in ("exporting_package", "defining_package"))
    exporting.write_text("from defining_package.procs import keep\nfrom subprocess import Popen\n")
    defining.write_text("def keep(output_token_ids, logits):\n    return logits\n")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("separator", [":", r"\."])
def test_exported_callable_of_an_allowed_module(separator: str) -> None:
    name = f"exporting_package.procs{separator[-1]}"
    both = CallableLibrary(rf"(exporting|defining)_package\.procs{separator}\w+", None)
    assert both.make(CallableRequest(f"{name}keep")).name == f"{name}keep"
    with pytest.raises(ProcessorLoadError, match=r"it is subprocess\.Popen, which is not allowed"):
        both.make(CallableRequest(f"{name}Popen", ("true",)))
    one = CallableLibrary(rf"exporting_package\.procs{separator}\w+", None)
    with pytest.raises(ProcessorLoadError, match=r"it is defining_package\.procs\.keep, which is not allowed"):
        one.make(CallableRequest(f"{name}keep"))
