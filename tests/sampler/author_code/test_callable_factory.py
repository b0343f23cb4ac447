from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinLengthLogitsProcessor

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.author_code.callable_factory import CallableFactory


class Tokenizer:
    """The methods by which a tokenizer is recognized. Copying it fails the test."""

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def decode(self, token_ids: list[int]) -> str:
        return "x" * token_ids[0]

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        raise AssertionError("a tokenizer was copied")


class Counter:
    """Adds the number of its calls."""

    def __init__(self, start: float = 0.0, names: list[str] | None = None) -> None:
        self.calls = start
        self.names = names

    def __call__(self, past: list[int], row: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return row + self.calls

    def method(self, past: list[int], row: torch.Tensor) -> torch.Tensor:
        return self(past, row)


class Phrase:
    """Has the constructor of logits-processor-zoo's classes."""

    def __init__(self, phrase: str, tokenizer: Any, batch_size: int, strict: bool = False) -> None:
        self.phrase = tokenizer.encode(phrase)
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Cloned(Counter):
    clones = 0

    def clone(self) -> Cloned:
        Cloned.clones += 1
        return Cloned(self.calls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cloned:
        raise AssertionError("it has clone()")


class RowLevel(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


def plain(past: list[int], row: torch.Tensor) -> torch.Tensor:
    return row


def make_counter(start: float = 0.0) -> Counter:
    return Counter(start)


def make_with(tokenizer: Any) -> Any:
    return Phrase("made", tokenizer, 1)


def count_to_three(counter: Any) -> list[float]:
    return [float(counter([], torch.zeros(1))) for _ in range(3)]


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (Counter, (), {}),
        (Counter, (0.0,), {}),
        (Counter, (), {"start": 0.0}),
        (partial(Counter, start=0.0), (), {}),
        (make_counter, (0.0,), {}),
        (make_counter, (), {"start": 0.0}),
        (partial(make_counter, 0.0), (), {}),
        (lambda: Counter(), (), {}),
        (Counter(), (), {}),
        (Counter().method, (), {}),
        (partial(lambda counter, past, row: counter(past, row), Counter()), (), {}),
        (Cloned(), (), {}),
    ],
)
def test_each_sequence_gets_its_own_callable(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    factory = CallableFactory(target, args, kwargs)
    first, second = factory(), factory()
    assert count_to_three(first) == [1.0, 2.0, 3.0]
    assert count_to_three(second) == [1.0, 2.0, 3.0]
    assert count_to_three(factory()) == [1.0, 2.0, 3.0]


def test_function_is_shared() -> None:
    factory = CallableFactory(plain)
    assert factory() is factory() is plain
    assert factory.name == "plain"


def test_arguments_are_copied_per_sequence() -> None:
    names = ["a"]
    factory = CallableFactory(Counter, kwargs={"names": names})
    first: Any = factory()
    first.names.append("b")
    second: Any = factory()
    assert (second.names, names) == (["a"], ["a"])


def test_missing_constructor_arguments_are_filled_in() -> None:
    tokenizer = Tokenizer()
    made: Any = CallableFactory(Phrase, ("end",), tokenizer=tokenizer)()
    assert made.tokenizer is tokenizer
    assert (made.phrase, made.batch_size) == ([3], 1)


def test_given_constructor_arguments_are_kept() -> None:
    own = Tokenizer()
    made: Any = CallableFactory(Phrase, ("end", own), {"batch_size": 4}, tokenizer=Tokenizer())()
    assert made.tokenizer is own
    assert made.batch_size == 4
    partly: Any = CallableFactory(partial(Phrase, "end", tokenizer=own), tokenizer=Tokenizer())()
    assert partly.tokenizer is own


def test_optional_tokenizer_is_filled_in() -> None:
    class Optional(Counter):
        def __init__(self, tokenizer: Any = None, batch_size: int = 7) -> None:
            super().__init__()
            self.given = tokenizer, batch_size

    tokenizer = Tokenizer()
    made: Any = CallableFactory(Optional, tokenizer=tokenizer)()
    assert made.given == (tokenizer, 7)
    without: Any = CallableFactory(Optional)()
    assert without.given == (None, 7)


def test_factory_function_gets_tokenizer() -> None:
    tokenizer = Tokenizer()
    made: Any = CallableFactory(make_with, tokenizer=tokenizer)()
    assert made.tokenizer is tokenizer


@pytest.mark.parametrize(
    "wrap", [lambda made: made, lambda made: LogitsProcessorList([made]), lambda made: made.__call__]
)
def test_copies_share_tokenizers_and_modules(wrap: Any) -> None:
    class Guided(Phrase):
        def __init__(self, tokenizer: Any) -> None:
            super().__init__("end", tokenizer, 1)
            self.model = torch.nn.Linear(2, 2)
            self.parts = {"by name": [(tokenizer, self.model)]}
            self.seen = torch.zeros(2)
            self.itself = self

    tokenizer = Tokenizer()
    original = Guided(tokenizer)
    made: Any = CallableFactory(wrap(original))()
    copied = made[0] if isinstance(made, list) else getattr(made, "__self__", made)
    assert copied is not original
    assert copied.itself is copied
    assert copied.model is original.model
    assert copied.parts["by name"][0] == (tokenizer, original.model)
    assert copied.seen is not original.seen


def test_clone_is_preferred() -> None:
    before = Cloned.clones
    factory = CallableFactory(Cloned(2.0))
    assert count_to_three(factory()) == [3.0, 4.0, 5.0]
    assert Cloned.clones > before


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (
            Phrase,
            (),
            r"^Phrase\(phrase: .* cannot create a request-level callable .*: missing a required argument: 'phrase'",
        ),
        (Phrase, ("end",), "missing a required argument: 'tokenizer'"),
        (Counter, (1.0, [], 2), "too many positional arguments"),
        (Counter(), (1.0,), "Counter is an object already: arguments are for a class or a function"),
        (partial(Counter(), []), (1.0,), "Counter is an object already"),
        (lambda row: row, (), r"takes \(row\): expected a callable of \(output_token_ids, logits\)"),
        (lambda *args: args[-1], (), "with two arguments and with three"),
        (lambda input_ids, scores, k: scores, (), "more than input_ids and scores"),
        (RowLevel(), (), "RowLevel is a CustomLogitProcessor"),
        ([Counter()], (), "list is not callable"),
        ("module:Class", (), "str is not callable"),
        (min, (), "min has no signature"),
    ],
)
def test_invalid_target_is_rejected(target: Any, args: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        CallableFactory(target, args)


def test_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'begin'"):
        CallableFactory(Counter, kwargs={"begin": 1.0})


def test_uncopyable_object_is_rejected() -> None:
    counter = Counter()
    counter.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        TypeError, match=r"^Counter cannot be copied, .*: TypeError: cannot pickle.* a method clone\(\)"
    ):
        CallableFactory(counter)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt("no"), MemoryError()])
def test_constructor_exception_is_a_load_error(error: BaseException) -> None:
    class Broken(Counter):
        def __init__(self) -> None:
            raise error

    with pytest.raises(ProcessorLoadError, match=f"Broken cannot be created: {type(error).__name__}") as raised:
        CallableFactory(Broken)()
    assert ", in __init__\n" in str(raised.value)
    assert "in construct" not in str(raised.value)


@pytest.mark.parametrize("made", [None, 3, [plain], lambda row: row])
def test_factory_function_result_is_checked(made: Any) -> None:
    with pytest.raises(TypeError, match="expected a callable of"):
        CallableFactory(lambda: made)()


def test_abstract_class_is_a_load_error() -> None:
    class Unfinished(CustomLogitProcessor):
        pass

    with pytest.raises(ProcessorLoadError, match="Unfinished cannot be created: TypeError: Can't instantiate"):
        CallableFactory(Unfinished)()


def test_class_without_signature() -> None:
    """Classes written in C may have no signature: they are called with the given arguments."""
    made: Any = CallableFactory(partial, (plain,))()
    assert made.func is plain


def test_torch_settings_are_restored() -> None:
    class Setting(Counter):
        def __init__(self) -> None:
            super().__init__()
            torch.set_default_dtype(torch.float64)

    CallableFactory(Setting)()
    assert torch.get_default_dtype() is torch.float32


def test_hugging_face_objects_and_classes() -> None:
    by_class: Any = CallableFactory(MinLengthLogitsProcessor, (3,), {"eos_token_id": 1})()
    by_object: Any = CallableFactory(MinLengthLogitsProcessor(3, 1))()
    for made in (by_class, by_object):
        assert made(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 2)).tolist() == [[0.0, float("-inf")]]
