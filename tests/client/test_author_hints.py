"""Advice on mistakes that authors bring from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError, ProcessorSerializationError
from logitship.client import author_hints, scrub
from logitship.client.author_errors import error_text
from logitship.client.author_hints import sandbox_hint
from logitship.client.serialization.call_signature import signature_mistake
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import SourceProcessor

EXPECTED = (
    "a CustomLogitProcessor is called once per step for all of its rows, as __call__(self, logits, custom_param_list). "
    "The tokens of a row are in custom_param_list[row]['__req__']: origin_input_ids and output_ids"
)

OR_HUGGING_FACE = "Or derive it from transformers.LogitsProcessor instead: processor= takes those as they are"


class HuggingFaces(CustomLogitProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:  # type: ignore[override]
        return scores


class Vllms(CustomLogitProcessor):
    def __call__(self, prompt_token_ids: Any, output_token_ids: Any, logits: Any) -> Any:  # type: ignore[override]
        return logits


class VllmsWithoutPrompt(CustomLogitProcessor):
    def __call__(self, token_ids: Any, logits: Any) -> Any:  # type: ignore[override]
        return logits


class LogitsOnly(CustomLogitProcessor):
    def __call__(self, logits: Any) -> Any:  # type: ignore[override]
        return logits


class Correct(CustomLogitProcessor):
    def __call__(self, scores: Any, params: Any = None, /, *others: Any) -> Any:
        return scores


class Static(CustomLogitProcessor):
    @staticmethod
    def __call__(logits: Any, custom_param_list: Any) -> Any:  # type: ignore[override]
        return logits


class OfTheClass(CustomLogitProcessor):
    @classmethod
    def __call__(cls, logits: Any, custom_param_list: Any) -> Any:  # type: ignore[override]
        return logits


class NeedsKeyword(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any, *, bias: Any, scale: Any = 1) -> Any:  # type: ignore[override]
        return logits


MISTAKES = [
    (HuggingFaces, f"its __call__ takes (input_ids, scores), as Hugging Face's: {EXPECTED}. {OR_HUGGING_FACE}"),
    (
        Vllms,
        "its __call__ takes (prompt_token_ids, output_token_ids, logits), as vLLM's, with the logits last: " + EXPECTED,
    ),
    (VllmsWithoutPrompt, f"its __call__ takes (token_ids, logits), as vLLM's, with the logits last: {EXPECTED}"),
    (NeedsKeyword, f"its __call__ takes (logits, custom_param_list, *, bias): {EXPECTED}"),
    (LogitsOnly, f"its __call__ takes (logits): {EXPECTED}"),
]


@pytest.mark.parametrize(("cls", "mistake"), MISTAKES)
def test_signatures_of_other_libraries_are_refused_by_to_str(cls: type[CustomLogitProcessor], mistake: str) -> None:
    with pytest.raises(ProcessorSerializationError) as caught:
        cls.to_str()
    assert str(caught.value) == f"class {cls.__name__} cannot be called by a server: {mistake}"
    assert caught.value.__cause__ is None


def test_signatures_of_other_libraries_are_refused_at_load() -> None:
    source = (
        "from logitship import CustomLogitProcessor\nclass P(CustomLogitProcessor):\n"
        "    def __call__(self, input_ids, scores):\n        return scores\n"
    )
    with pytest.raises(ProcessorLoadError) as caught:
        load_class(SourceProcessor(source, "P"))
    assert str(caught.value) == f"class P cannot be called: {MISTAKES[0][1]}"


def test_correct_signature() -> None:
    assert [signature_mistake(cls) for cls in (Correct, Static, OfTheClass)] == ["", "", ""]


def test_path_that_the_author_wrote_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if it begins with a folder of the server, which messages omit."""

    def read() -> None:
        Path("/a/b/words.txt").read_text()

    monkeypatch.setattr(scrub, "known_folders", lambda: ("/a",))
    scrub._folders.cache_clear()
    try:
        with pytest.raises(FileNotFoundError) as caught:
            read()
        assert error_text(caught.value) == "FileNotFoundError: [Errno 2] No such file or directory: '/a/b/words.txt'"
        with pytest.raises(FileNotFoundError) as caught:
            Path("/".join(["", "a", "b", "hidden.txt"])).read_text()
        assert "'b/hidden.txt'" in error_text(caught.value)
    finally:
        monkeypatch.undo()
        scrub._folders.cache_clear()


@pytest.mark.parametrize("module", ["requests.exceptions", "aiohttp.client_exceptions", "urllib3.exceptions"])
def test_errors_of_networking_libraries(module: str) -> None:
    error = type("ConnectionError", (Exception,), {"__module__": module})("Max retries exceeded")
    assert sandbox_hint(error).startswith("the sandbox has no network. Fetch the data before you send the class")


class _Metaclass(type):
    def __eq__(cls, other: object) -> bool:
        raise GeneratorExit

    __hash__ = type.__hash__


class _Text:
    def __str__(self) -> str:
        raise GeneratorExit


class _Globals(dict[str, Any]):
    def get(self, *arguments: Any) -> Any:
        raise GeneratorExit


def _raised_with(variables: dict[str, Any]) -> BaseException:
    variables["__builtins__"] = {"type": type, "OSError": OSError}
    with pytest.raises(OSError) as caught:  # noqa: PT011
        exec("raise type('Odd', (OSError,), {})(2, 'x')", variables)
    return caught.value


ODD_ERRORS = {
    "error number": lambda: OSError([], "x"),
    "metaclass": lambda: _Metaclass("Odd", (Exception,), {})(),
    "message": lambda: RuntimeError(_Text()),
    "class without a module": lambda: _raised_with({}),
    "globals": lambda: _raised_with(_Globals()),
}


@pytest.mark.parametrize("name", ODD_ERRORS)
def test_hostile_exceptions_run_no_code(name: str) -> None:
    """Otherwise, there would be no advice on the cause."""
    error = ODD_ERRORS[name]()
    error.__cause__ = RuntimeError("No CUDA GPUs are available")
    assert sandbox_hint(error).startswith("there is no GPU in the sandbox")


def test_exception_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> bool:
        raise GeneratorExit

    monkeypatch.setattr(author_hints, "_HINTS", [(fail, "a hint")])
    assert sandbox_hint(ValueError()) == ""


def test_errors_that_have_nothing_to_do_with_the_sandbox() -> None:
    assert sandbox_hint(ValueError("cuda")) == ""
    assert sandbox_hint(KeyError("open")) == ""
    assert sandbox_hint(torch.cuda.OutOfMemoryError("CUDA out of memory")) == ""
