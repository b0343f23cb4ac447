"""Processors of transformers as processors of requests: the tokens are those of `model.generate`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TypicalLogitsWarper,
)

from logitship import (
    LLM,
    Client,
    CustomLogitProcessor,
    ProcessorFault,
    ProcessorSerializationError,
    SamplingParams,
    from_hugging_face,
)
from logitship.client import hugging_face
from logitship.client.author_errors import author_line, author_traceback
from logitship.client.http import http_requests
from logitship.client.http.processor_argument import ProcessorStrings
from logitship.client.http.request_options import GenerateOptions
from logitship.client.hugging_face import is_hugging_face
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor, parse
from logitship.client.serialization.serialize import serialize
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.model.model_loader import LoadedModel
from logitship.server.processors.runnable_source import runnable_text

PROMPTS = [[5, 6, 7, 8], [40, 41, 42], [9, 9, 9, 9, 9, 9]]
LENGTH = 12


class Alternating(LogitsProcessor):
    """Forbids the tokens of the last `distance` steps; in every second call all below `floor` too."""

    def __init__(self, distance: int, floor: int = 100) -> None:
        self.distance = distance
        self.floor = floor
        self.calls = 0
        self.bias = torch.linspace(0, 1, 260)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.calls += 1
        if self.calls % 2 == 0:
            scores[:, : self.floor] = -torch.inf
        return scores.scatter(1, input_ids[:, -self.distance :], -torch.inf) + self.bias


class WithTokenizer(LogitsProcessor):
    """Forbids a letter. Takes the tokenizer, as many do."""

    def __init__(self, tokenizer: Any, letter: str) -> None:
        self.token_id = tokenizer.convert_tokens_to_ids(letter)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token_id] = -torch.inf
        return scores


PROCESSORS: dict[str, Callable[[], Any]] = {
    "own": lambda: Alternating(3),
    "repetition": lambda: RepetitionPenaltyLogitsProcessor(2.5),
    "n-grams": lambda: NoRepeatNGramLogitsProcessor(2),
    "list": lambda: LogitsProcessorList([Alternating(2, 60), RepetitionPenaltyLogitsProcessor(1.7)]),
}


@pytest.fixture(params=["none", "sandbox"])
def llm(request: pytest.FixtureRequest, make_engine: Callable[..., AsyncEngine]) -> LLM:
    """`LLM` on the tiny model; processors run in this process and in sandboxes."""
    return LLM._from_engine(make_engine(processor_isolation=request.param))


def of_transformers(model: Any, make: Callable[[], Any], prompt: list[int]) -> list[int]:
    """Return the tokens of `model.generate`. A processor of a batch sees all rows, so there is one prompt."""
    made = make()
    processors = made if isinstance(made, list) else LogitsProcessorList([made])
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        logits_processor=processors,
        do_sample=False,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        eos_token_id=259,
        pad_token_id=0,
    )
    return list(generated[0, len(prompt) :].tolist())


@pytest.mark.slow
def test_tokens_are_those_of_transformers(llm: LLM, unserved_model: LoadedModel) -> None:
    for make in PROCESSORS.values():
        params = SamplingParams(
            temperature=0, max_tokens=LENGTH, custom_logit_processor=make(), ignore_eos=True, logit_bias={259: -100.0}
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens == [of_transformers(unserved_model.model, make, prompt) for prompt in PROMPTS]
    # A class is constructed of the request's parameters, and so is one that needs the tokenizer.
    given = {"distance": 3, "letter": "e", "unknown": 1}
    params = SamplingParams(
        temperature=0,
        max_tokens=LENGTH,
        custom_logit_processor=[Alternating, WithTokenizer],
        custom_params=given,
        ignore_eos=True,
        logit_bias={259: -100.0},
    )
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False)
    tokenizer = unserved_model.tokenizer.hf_tokenizer

    def both() -> LogitsProcessorList:
        return LogitsProcessorList([Alternating(3), WithTokenizer(tokenizer, "e")])

    assert list(output.outputs[0].token_ids) == of_transformers(unserved_model.model, both, PROMPTS[0])


def sent(prompt: Any, **options: Any) -> dict[str, Any]:
    """Return the body of a request."""
    body = http_requests.generate(prompt, None, cast(GenerateOptions, options), stream=False).json
    assert isinstance(body, dict)
    return body


def test_client_sends_objects_classes_and_lists() -> None:
    both = LogitsProcessorList([Alternating(2), Alternating(3)])
    one = sent("Hi", processor=both)["custom_logit_processor"]
    assert isinstance(one, str)
    batch = sent(["a", "b"], processor=both)["custom_logit_processor"]
    assert batch == one
    several = sent("Hi", processor=[Alternating(2), TypicalLogitsWarper])
    first, second = map(parse, several["custom_logit_processor"])
    assert isinstance(first, PickledProcessor)
    assert isinstance(second, PickledProcessor)
    assert (first.name, first.params_schema) == ("Alternating", None)
    assert second.params_schema is not None
    entry = {"processor": Alternating(2), "params": {}}
    (given,) = sent("Hi", logits_processors=[entry])["logits_processors"]
    assert parse(given["processor"]) == first


def test_string_has_the_attributes() -> None:
    strings = [from_hugging_face(Alternating(distance)).to_str() for distance in (2, 2, 3)]
    assert strings[0] == strings[1] != strings[2]
    assert ProcessorStrings()(Alternating(2), "processor") == strings[0]


def test_object_of_many_prompts_is_serialized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, processor = ProcessorStrings(), Alternating(2)
    first = texts(processor, "processor")
    monkeypatch.setattr(texts, "_serialize", None)
    assert texts(processor, "processor") is first


def test_class_says_which_params_it_requires() -> None:
    assert from_hugging_face(Alternating).params_schema == {"type": "object", "required": ["distance"]}
    assert from_hugging_face(WithTokenizer).params_schema == {"type": "object", "required": ["letter"]}


def test_only_processors_of_transformers_are_recognized() -> None:
    assert all(map(is_hugging_face, (Alternating, Alternating(1), LogitsProcessorList(), TypicalLogitsWarper)))
    assert not any(map(is_hugging_face, ([], CustomLogitProcessor, Client, "Alternating", lambda a, b: b)))
    with pytest.raises(TypeError, match="expected a LogitsProcessor of transformers, or its class, not list"):
        from_hugging_face([Alternating(1)])


class Offset(LogitsProcessor):
    def __init__(self, by: float = 0.5) -> None:
        self.by = by

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids[0, -1] == 9:
            raise ValueError("nine")
        return scores + self.by


class NamesItself(Offset):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super(NamesItself, self).__call__(input_ids, scores)  # noqa: UP008


class Slotted(LogitsProcessor):
    __slots__ = ("by",)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.by  # type: ignore[attr-defined, no-any-return]


def steps(processor: Any, *, last: int = 3) -> list[Any]:
    """Return the logits of two steps of a row."""
    request = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[last], state={}, tokenizer=None)
    params = [{"distance": 2, "penalty": 1.5, "__req__": request}]
    return [processor(torch.arange(260.0)[None] / 260, params).tolist() for _ in range(2)]


@pytest.mark.parametrize(
    "processor",
    [
        Alternating(2, floor=4),
        Alternating,
        Offset,
        RepetitionPenaltyLogitsProcessor(1.5),
        RepetitionPenaltyLogitsProcessor,
        LogitsProcessorList([Alternating(2, floor=4), RepetitionPenaltyLogitsProcessor(1.5), Offset(2.0)]),
        LogitsProcessorList([TypicalLogitsWarper(0.5)]),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_source_does_the_same(processor: Any) -> None:
    cls = from_hugging_face(processor)
    string = serialize(cls)
    assert string.source is not None
    assert string.source.class_name == cls.__name__
    assert not re.search(r"(import|from) logitship", string.source.source)
    expected = steps(cls())
    forms: list[PickledProcessor | SourceProcessor] = [string, string.source]
    for form in forms:
        loaded = load_class(form)
        assert (loaded.__name__, loaded.__doc__) == (cls.__name__, cls.__doc__)
        assert steps(loaded()) == expected
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(compile(runnable_text(string.source), "<shown>", "exec", dont_inherit=True), shown)
    assert steps(shown[cls.__name__]()) == expected


def test_class_that_uses_its_own_name_or_slots_has_no_source() -> None:
    slotted = Slotted()
    slotted.by = 1.0  # type: ignore[attr-defined]
    for processor in (NamesItself, NamesItself(), slotted):
        string = serialize(from_hugging_face(processor))
        assert string.source is None
        assert steps(load_class(string)()) == steps(from_hugging_face(processor)())


@pytest.mark.parametrize("processor", [Offset, Offset(), LogitsProcessorList([Offset()])])
def test_traceback_has_the_authors_line(processor: Any) -> None:
    string = serialize(from_hugging_face(processor))
    assert string.source is not None
    forms: list[PickledProcessor | SourceProcessor] = [string, string.source]
    for form in forms:
        with pytest.raises(ValueError, match="nine") as caught:
            steps(load_class(form)(), last=9)
        assert author_line(author_traceback(caught.value)).endswith('in __call__: raise ValueError("nine")')


def test_attribute_that_cannot_be_serialized_is_named() -> None:
    processor = Alternating(1)
    processor.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ProcessorSerializationError, match="attribute 'original' of class Alternating holds a lock"):
        sent("Hi", processor=processor)


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "MAX_STRING", 1000)
    with pytest.raises(ProcessorSerializationError, match="more than 1000: it holds something large"):
        sent("Hi", processor=Alternating(1))


def test_copies_share_the_tokenizer(unserved_model: LoadedModel) -> None:
    processor = Alternating(1)
    processor.tokenizer = unserved_model.tokenizer.hf_tokenizer  # type: ignore[attr-defined]
    made = from_hugging_face(processor)()
    first, second = made.make({}), made.make({})  # type: ignore[attr-defined]
    assert first is not second
    assert first.bias is not second.bias
    assert first.tokenizer is second.tokenizer is processor.tokenizer  # type: ignore[attr-defined]


STOCK = """
import json, sys
from types import SimpleNamespace
sys.path.insert(0, {peers!r})
import torch
import sglang_peer
peer = sglang_peer.load()
processor = peer.custom_logit_processor.CustomLogitProcessor.from_str(sys.stdin.read())
params = {{"__req__": SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3])}}
step = peer.step([(processor, [0])], [params])
rows = []
for _ in range(2):
    logits = torch.zeros(1, 260)
    step(logits)
    rows.append([i for i, value in enumerate(logits[0].tolist()) if value == float("-inf")])
assert not any(name.partition(".")[0] == "logitship" for name in sys.modules)
json.dump(rows, sys.stdout)
"""


@pytest.mark.slow
def test_string_runs_on_stock_sglang(tmp_path: Path) -> None:
    program = STOCK.format(peers=str(Path(__file__).parents[1] / "peers"))
    string = from_hugging_face(Alternating(2, floor=4)).to_str()
    result = subprocess.run(
        [sys.executable, "-c", program], input=string, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [[2, 3], [0, 1, 2, 3]]


class Forgetful(LogitsProcessor):
    """Edits in place, and returns nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        scores[:, 0] = -torch.inf


def test_missing_return_is_named(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, custom_logit_processor=Forgetful())
    with pytest.raises(
        ProcessorFault, match=r"^processor Forgetful returned NoneType, .* must return the logits"
    ) as fault:
        llm.generate("a", params, use_tqdm=False)
    assert "hugging_face.py" not in str(fault.value)
