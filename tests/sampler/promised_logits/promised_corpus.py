"""Processors of many authors, to be called on real and on promised logits."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import math
import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from logitship import CustomLogitProcessor, RowProcessor, SamplingParams
from logitship.builtin_processors.disallowed_tokens import DisallowedTokensLogitsProcessor
from logitship.builtin_processors.no_repeat_ngram import DeepseekOCRNoRepeatNGramLogitProcessor
from logitship.builtin_processors.thinking_budget import Qwen3ThinkingBudgetLogitProcessor
from logitship.client.serialization.loading import instantiate_prepared, load_class
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.promised_logits.promise_scan import reason_against_promises

from . import hugging_face_idioms
from .promised import assert_same, eager, example_logits, promised

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "server" / "playground" / "examples"
COOKBOOK = ROOT / "docs" / "cookbook.md"
NUM_ROWS, NUM_STEPS = 3, 6
BASES = (CustomLogitProcessor, RowProcessor)

Call = Callable[[torch.Tensor, list[dict[str, Any]]], Any]


@dataclass(frozen=True)
class Case:
    """A processor of the corpus.

    Attributes:
        corpus: where it is from.
        name: its name.
        create: returns a new instance, given a tokenizer.
        params: its parameters.
        dense_reason: why it is never called on promised logits; "" if it is.
    """

    corpus: str
    name: str
    create: Callable[[Any], Call]
    params: Mapping[str, Any] = field(default_factory=dict)
    dense_reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """Outcome of a processor's calls.

    Attributes:
        corpus, name: those of the case.
        num_read: number of steps in which it used a value of the logits.
        num_raised: number of steps in which it raised.
        dense_reason: that of the case.
    """

    corpus: str
    name: str
    num_read: int
    num_raised: int
    dense_reason: str

    @property
    def never_reads(self) -> bool:
        """True if no step waited for the logits."""
        return not self.num_read and not self.dense_reason

    @property
    def how(self) -> str:
        """Return in words if it used values."""
        if self.dense_reason:
            return f"always: {self.dense_reason}"
        return f"in {self.num_read} of {NUM_STEPS} steps" if self.num_read else "never"


def coverage(case: Case, tokenizer: PreTrainedTokenizerFast, *, read_first: bool = False) -> Coverage:
    """Call a processor in some steps on real and on promised logits. The results must have the same bits."""
    vocab_size = len(tokenizer)
    plain, tried = ([row_params(case, tokenizer, vocab_size) for _ in range(NUM_ROWS)] for _ in range(2))
    call, other = case.create(tokenizer), case.create(tokenizer)
    num_read = num_raised = 0
    for step in range(NUM_STEPS):
        logits = example_logits(NUM_ROWS, vocab_size, seed=step)
        torch.manual_seed(step)
        expected = eager(lambda given: call(given, plain), logits)  # called now
        torch.manual_seed(step)
        found = promised(lambda given: other(given, tried), logits, read_first=read_first)
        assert_same(found, expected)
        num_read += found.was_read
        num_raised += isinstance(expected.result, Exception)
        chosen = example_logits(NUM_ROWS, vocab_size, seed=step + 1).argmax(-1).tolist()
        for rows in (plain, tried):
            for params, token in zip(rows, chosen, strict=True):
                params["__req__"].output_ids.append(token)
    return Coverage(case.corpus, case.name, num_read, num_raised, case.dense_reason)


def row_params(case: Case, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the parameters of a row, without output tokens."""
    prompt = tokenizer.encode("To be, or not to be: that is the question.\n1. Yes\n2. No\n", add_special_tokens=False)
    view = RequestView(
        rid="r",
        prompt_token_ids=prompt,
        output_token_ids=[],
        sampling_params=SamplingParams(),
        model=ModelView(vocab_size, frozenset({1}), tokenizer),
    )
    return {**copy.deepcopy(dict(case.params)), "__req__": view}


def cases(folder: Path) -> Iterator[Case]:
    """Yield the whole corpus.

    Args:
        folder: for a file with the cookbook's classes.
    """
    yield from sglang()
    yield from zoo()
    yield from cookbook(folder)
    yield from playground()
    yield from documentation(folder)
    yield from hugging_face()
    yield from other_tests()


def sglang() -> Iterator[Case]:
    """Yield SGLang's own, one of each base class."""
    budget = {"thinking_budget": 2}
    for cls, params in (
        (DisallowedTokensLogitsProcessor, {"token_ids": [5, 6, 7]}),
        (Qwen3ThinkingBudgetLogitProcessor, budget),
        (DeepseekOCRNoRepeatNGramLogitProcessor, {"ngram_size": 2, "window_size": 10}),
    ):
        yield _of_class("SGLang", _small_ids(cls), params, cls.__name__)


def _small_ids(cls: type[CustomLogitProcessor]) -> type[CustomLogitProcessor]:
    """Return a class whose tokens are in the vocabulary of the tests."""
    names = {"THINKING_START_TOKEN_ID": 2, "THINKING_END_TOKEN_ID": 3, "NEW_LINE_TOKEN_ID": 14}
    if not hasattr(cls, "THINKING_START_TOKEN_ID"):
        return cls
    return type(cls.__name__, (cls,), names)


def zoo() -> Iterator[Case]:
    """Yield logits-processor-zoo's, on all rows at once."""
    for name, arguments in {
        "CiteFromPromptLogitsProcessor": {"boost_factor": 2.0},
        "ForceLastPhraseLogitsProcessor": {"phrase": "Thanks", "batch_size": NUM_ROWS},
        "GenLengthLogitsProcessor": {"boost_factor": 1.0},
        "MaxTimeLogitsProcessor": {"max_time": 600.0},
        "MaxTimeLogitsProcessor, time over": {"max_time": 0.0},
        "MultipleChoiceLogitsProcessor": {"choices": ["1", "2"], "boost_first_words": 0.5},
        "PreventHallucinationLogitsProcessor": {"minp": 0.9, "batch_size": NUM_ROWS},
        "TriggerPhraseLogitsProcessor": {"phrase": "ab", "trigger_token_phrase": "c", "batch_size": NUM_ROWS},
    }.items():
        cls = getattr(importlib.import_module("logits_processor_zoo.transformers"), name.partition(",")[0])

        def create(tokenizer: Any, cls: Any = cls, arguments: Any = arguments) -> Call:
            return _with_input_ids(cls(tokenizer=tokenizer, **arguments) if _takes_tokenizer(cls) else cls(**arguments))

        yield Case("logits-processor-zoo", name, create)


def _takes_tokenizer(cls: type) -> bool:
    return "tokenizer" in inspect.signature(cls).parameters


def cookbook(folder: Path) -> Iterator[Case]:
    """Yield the classes of the cookbook."""
    params: dict[str, dict[str, Any]] = {
        "KeepOut": {"scripts": ["DIGIT", "GREEK"]},
        "OneOf": {"labels": ["yes", "no"]},
        "BannedWords": {"words": ["a", "sea"]},
        "Length": {"at_least": 2, "about": 4},
        "Interject": {"after": 1, "say": "so"},
        "Quote": {"text": "banana"},
        "DRY": {"allowed_length": 1},
        "XTC": {"seed": 2, "probability": 1.0, "threshold": 0.001},
        "TopNSigma": {"n": 1.0},
        "Watermark": {"key": 1},
    }
    for name, cls in _classes_of_page(COOKBOOK, folder).items():
        yield _of_class("cookbook", cls, params[name], name)


def documentation(folder: Path) -> Iterator[Case]:
    """Yield the classes of other pages."""
    params: dict[str, dict[str, Any]] = {
        "Boost": {"token_ids": [5, 6], "bias": 2.0},
        "Sentences": {"sentences": 1},
        "NoDigits": {},
        "Alternate": {"lists": [[5, 6], [7]]},
    }
    found = _classes_of_page(ROOT / "docs" / "writing-processors.md", folder)
    for name, values in params.items():
        yield _of_class("documentation", found[name], values, name)


def _classes_of_page(page: Path, folder: Path) -> dict[str, type[CustomLogitProcessor]]:
    """Run the definitions of a page as a file."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    parts = [
        ast.get_source_segment(block, statement) or ""
        for block in blocks
        for statement in ast.parse(block).body
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
    ]
    script = folder / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n\n\n".join(parts) + "\n")
    return {
        name: value
        for name, value in runpy.run_path(str(script)).items()
        if isinstance(value, type) and issubclass(value, CustomLogitProcessor) and value not in BASES
    }


def playground() -> Iterator[Case]:
    """Yield the playground's examples."""
    for example in json.loads((EXAMPLES / "index.json").read_text()):
        name = "".join(part.title() for part in example["id"].split("_"))
        source = (EXAMPLES / f"{example['id']}.py").read_text()
        yield _of_class("playground", load_class(SourceProcessor(source, name)), example["params"], name)


def other_tests() -> Iterator[Case]:
    """Yield the classes of other tests, except those that differ from call to call for reasons of their own."""
    params = {
        "token_ids": [5, 6],
        "token_id": 5,
        "token": 5,
        "tokens": [5, 6, 7, 8, 9, 10],
        "by": 2,
        "bias": 2.0,
        "number": 7,
        "end": 9,
        "text": "abcdefgh",
        "keeps": False,
        "seen": [],
    }
    for module in OTHER_TESTS:
        for name, cls in vars(importlib.import_module(f"tests.{module}")).items():
            is_class = isinstance(cls, type) and issubclass(cls, CustomLogitProcessor)
            if is_class and cls.__module__ == f"tests.{module}" and name not in NOT_REPEATABLE:
                yield _of_class("tests", cls, params, f"{module.rpartition('.')[2].removeprefix('test_')}: {name}")


OTHER_TESTS = (
    "server.check.checks.test_contract",
    "server.check.checks.test_replays",
    "server.check.checks.test_serializability",
    "server.check.checks.test_speed",
    "server.check.test_environment",
    "server.check.test_row_loops",
    "server.check.test_run",
    "server.engine.test_async_engine",
    "server.engine.test_beam_group",
    "server.engine.test_installed_processors",
    "server.engine.test_thinking_token_budget",
    "server.http.test_documentation",
    "server.http.test_logits_processors",
    "server.http.test_real_engine",
    "server.offline.test_llm_beam_search",
    "server.offline.test_output_builder",
    "server.offline.test_prompt_processors",
)
NOT_REPEATABLE = frozenset(
    {
        "Clock",
        "Exits",
        "Failing",
        "Hangs",
        "InAGlobal",
        "Incomplete",
        "OnTheClass",
        "PythonRandom",
        "ReadsAFile",
        "Slow",
        "SlowInLargeBatch",
        "SlowTogether",
    }
)
"""Classes that cannot be created, whose instances share state, that read a clock or a file, or that end or hang."""


def hugging_face() -> Iterator[Case]:
    """Yield idioms of processors for Hugging Face's `generate`."""
    for name, function in hugging_face_idioms.IDIOMS.items():
        yield Case("Hugging Face idioms", name, lambda tokenizer, function=function: _with_input_ids(function))


def _with_input_ids(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Call:
    """Adapt a processor that takes the token ids of all rows."""

    def call(logits: torch.Tensor, params: list[dict[str, Any]]) -> Any:
        requests = [row["__req__"] for row in params]
        return function(torch.tensor([each.origin_input_ids + each.output_ids for each in requests]), logits)

    return call


def _of_class(corpus: str, cls: type[CustomLogitProcessor], params: Mapping[str, Any], name: str) -> Case:
    def create(tokenizer: Any) -> Call:
        return instantiate_prepared(cls, tokenizer, len(tokenizer))

    return Case(corpus, name, create, params, reason_against_promises(cls))


def share_without_reads(found: list[Coverage], corpora: frozenset[str]) -> float:
    """Return the share of processors of these corpora that never read."""
    chosen = [each.never_reads for each in found if each.corpus in corpora]
    return sum(chosen) / len(chosen) if chosen else math.nan


def table(found: list[Coverage]) -> list[str]:
    """Return the rows of a Markdown table."""
    head = ["| from | processor | uses the values of its logits |", "|---|---|---|"]
    return head + [f"| {each.corpus} | {each.name.replace('_', ' ')} | {each.how} |" for each in found]
