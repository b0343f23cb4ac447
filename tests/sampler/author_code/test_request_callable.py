from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor as HuggingFaceProcessor
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, NoRepeatNGramLogitsProcessor

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.author_code.request_callable import Convention, bind, convention_of, name_of


def of_output(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


def of_prompt_and_output(
    prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor
) -> torch.Tensor:
    return logits


def of_hugging_face(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


def with_option(output_token_ids: list[int], logits: torch.Tensor, bias: float = 1.0) -> torch.Tensor:
    return logits + bias


@wraps(of_prompt_and_output)
def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
    return of_prompt_and_output(*args, **kwargs)


class Methods:
    def __call__(self, past: list[int], row: torch.Tensor, *, strict: bool = False) -> torch.Tensor:
        return row

    def of_three(self, prompt: list[int], past: list[int], row: torch.Tensor, *rest: object) -> torch.Tensor:
        return row

    @staticmethod
    def of_tensors(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return scores

    @classmethod
    def of_class(cls, input_ids: torch.Tensor, scores: torch.Tensor, cur_len: int = 0) -> torch.Tensor:
        return scores


class NamedOtherwise(HuggingFaceProcessor):
    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return logits


class RowLevel(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (of_output, Convention.OUTPUT),
        (lambda past, row: row, Convention.OUTPUT),
        (Methods(), Convention.OUTPUT),
        (partial(with_option, bias=2.0), Convention.OUTPUT),
        (partial(of_prompt_and_output, [1]), Convention.OUTPUT),
        (lambda past, scores: scores, Convention.OUTPUT),
        (of_prompt_and_output, Convention.PROMPT_AND_OUTPUT),
        (wrapper, Convention.PROMPT_AND_OUTPUT),
        (Methods().of_three, Convention.PROMPT_AND_OUTPUT),
        (lambda prompt, past, scores: scores, Convention.PROMPT_AND_OUTPUT),
        (lambda prompt, past, scores, bias=1.0: scores, Convention.PROMPT_AND_OUTPUT),
        (of_hugging_face, Convention.HUGGING_FACE),
        (Methods.of_tensors, Convention.HUGGING_FACE),
        (Methods().of_tensors, Convention.HUGGING_FACE),
        (Methods.of_class, Convention.HUGGING_FACE),
        (partial(lambda k, input_ids, scores: scores, 3), Convention.HUGGING_FACE),
        (partial(lambda input_ids, scores, k: scores, k=3), Convention.HUGGING_FACE),
        (MinLengthLogitsProcessor(3, 1), Convention.HUGGING_FACE),
        (LogitsProcessorList(), Convention.HUGGING_FACE),
        (NamedOtherwise(), Convention.HUGGING_FACE),
    ],
)
def test_signature_determines_convention(function: object, convention: Convention) -> None:
    assert convention_of(function) is convention


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda row: row, r"takes \(row\): expected a callable of \(output_token_ids, logits\), \(prompt_token_ids"),
        (lambda a, b, c, d: d, r"takes \(a, b, c, d\): expected"),
        (lambda a, b, *, bias: b, r"takes \(a, b, \*, bias\): expected"),
        (lambda *args: args[-1], r"takes \(\*args\), which can be called with two arguments and with three"),
        (with_option, "with two arguments and with three: .* Give further parameters their values with functools"),
        (lambda input_ids, scores, k: scores, r"takes \(input_ids, scores, k\), more than input_ids and scores"),
        (Methods, "Methods is a class: expected .* such as an object of the class"),
        (min, "min has no signature: wrap it in a function"),
        ([of_output], "list is not callable: expected"),
        (None, "NoneType is not callable: expected"),
        (RowLevel(), "RowLevel is a CustomLogitProcessor, not a request-level callable"),
        (torch.nn.ReLU(), "ReLU takes .* expected"),
    ],
)
def test_unknown_convention_is_rejected(function: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        bind(function, [], [])


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (of_output, "of_output"),
        (partial(partial(of_output), []), "of_output"),
        (Methods, "Methods"),
        (Methods(), "Methods"),
        (Methods().of_three, "Methods.of_three"),
        (LogitsProcessorList(), "LogitsProcessorList"),
    ],
)
def test_name_of(target: object, name: str) -> None:
    assert name_of(target) == name


def test_name_of_local_function() -> None:
    def local() -> None: ...

    assert name_of(local) == "local"


def test_two_parameters_get_live_output() -> None:
    seen: list[list[int]] = []

    def note(past: list[int], row: torch.Tensor) -> torch.Tensor:
        seen.append(list(past))
        assert past is output
        return row

    output: list[int] = []
    bound = bind(note, None, output)
    for token in (3, 5):
        bound(torch.zeros(4))
        output.append(token)
    bound(torch.zeros(4))
    assert seen == [[], [3], [3, 5]]


def test_three_parameters_get_prompt_and_output() -> None:
    prompt, output = [1, 2], [3]

    def check(prompt_ids: list[int], past: list[int], row: torch.Tensor) -> torch.Tensor:
        assert prompt_ids is prompt
        assert past is output
        return row + len(prompt_ids) * 10 + len(past)

    assert bind(check, prompt, output)(torch.zeros(2)).tolist() == [21.0, 21.0]


@pytest.mark.parametrize("function", [of_prompt_and_output, of_hugging_face])
def test_missing_prompt_is_rejected(function: Any) -> None:
    with pytest.raises(
        ValueError, match=f"{function.__name__} takes the prompt's token ids, and this request has none"
    ):
        bind(function, None, [])
    assert bind(function, [], [])(torch.zeros(2)).tolist() == [0.0, 0.0]


def conventions(edit: Callable[[torch.Tensor], Any]) -> list[Any]:
    """Return a function of a tensor's last dimension in the three conventions."""
    return [
        lambda past, row: edit(row),
        lambda prompt, past, row: edit(row),
        lambda input_ids, scores: edit(scores),
    ]


def in_place(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 1] += 2.0
    return logits


def new_tensor(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.tensor([0.0, 2.0, 0.0])


def of_another_dtype(logits: torch.Tensor) -> torch.Tensor:
    return (logits + torch.tensor([0.0, 2.0, 0.0])).to(torch.bfloat16)


@pytest.mark.parametrize("edit", [in_place, new_tensor, of_another_dtype])
@pytest.mark.parametrize("place", range(3))
def test_in_place_and_new_results(edit: Callable[[torch.Tensor], torch.Tensor], place: int) -> None:
    row = torch.tensor([1.0, 2.0, 3.0])
    result = bind(conventions(edit)[place], [1], [])(row)
    assert result.dtype is torch.float32
    assert result.tolist() == [1.0, 4.0, 3.0]
    assert result.is_set_to(row) == (edit is in_place)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda logits: None, "NoneType, not a tensor"),
        (lambda logits: logits.tolist(), "list, not a tensor"),
        (lambda logits: logits[..., :2], r"shape \[(1, )?2\], expected \[(1, )?3\]"),
        (lambda logits: logits.resize_(2), r"shape \[2\], expected"),
        (lambda logits: logits.long(), "dtype torch.int64, expected a floating-point type"),
        (lambda logits: logits.to("meta"), "a tensor on meta, expected cpu"),
    ],
)
@pytest.mark.parametrize("place", range(3))
def test_invalid_result_is_described(edit: Callable[[torch.Tensor], Any], reason: str, place: int) -> None:
    bound = bind(conventions(edit)[place], [1], [])
    with pytest.raises(TypeError, match=reason):
        bound(torch.zeros(3))


def test_hugging_face_results_have_batch_dimension() -> None:
    bound = bind(lambda input_ids, scores: scores[0], [1], [])
    with pytest.raises(TypeError, match=r"shape \[3\], expected \[1, 3\]"):
        bound(torch.zeros(3))


def test_input_ids_are_the_whole_history() -> None:
    """Random lengths, compared with a new tensor; tensors of earlier steps keep their tokens."""
    rng = random.Random(0)
    for _ in range(30):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(70))]
        output = [rng.randrange(1000) for _ in range(rng.choice([0, 0, 1, 5]))]
        seen: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []

        def note(input_ids: torch.Tensor, scores: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            assert scores.shape == (1, 4)
            seen.append(input_ids)
            return scores

        bound = bind(note, prompt, output)
        for _ in range(rng.randrange(1, 40)):
            bound(torch.zeros(4))
            expected.append(torch.tensor([prompt + output], dtype=torch.int64))
            output.extend(rng.randrange(1000) for _ in range(rng.choice([0, 1, 1, 1, 3])))
        assert all(ids.dtype is torch.int64 for ids in seen)
        assert all(torch.equal(ids, whole) for ids, whole in zip(seen, expected, strict=True))


def test_input_ids_are_extended_in_place() -> None:
    """O(new tokens) per step: each token is read once, and only moves when the buffer grows."""
    read: list[int] = []
    seen: list[torch.Tensor] = []  # all kept alive, so that no address is reused

    class Output(list[int]):
        def __getitem__(self, place: Any) -> Any:
            part = super().__getitem__(place)
            read.extend(part)
            return part

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids)
        return scores

    output = Output()
    bound = bind(note, list(range(100)), output)
    for token in range(1000):
        output.append(token)
        bound(torch.zeros(2))
    assert seen[-1].tolist() == [[*range(100), *range(1000)]]
    assert read == list(range(1000))
    assert len({input_ids.data_ptr() for input_ids in seen}) <= 5


def test_hugging_face_processors_run() -> None:
    """Compared with the same processors on new tensors in each step."""
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), MinLengthLogitsProcessor(6, 1)])
    rng = random.Random(0)
    output: list[int] = []
    bound = bind(processors, [3, 2], output)
    for _ in range(12):
        row = torch.randn(5)
        expected = processors(torch.tensor([[3, 2, *output]]), row.clone().unsqueeze(0))[0]
        assert torch.equal(bound(row), expected)
        output.append(rng.randrange(5))
