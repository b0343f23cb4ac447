"""Fixtures for rows as passed by the sampler, and SGLang's real processors for comparison."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.watermarks import WATERMARK_KEY
from tests.helpers.zoo import recorded_tokenizers

ReadLogits = Callable[[Any], torch.Tensor]
Sglang = Callable[..., list[Any]]
MakeRow = Callable[..., dict[str, Any]]


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    """A row's entry of `custom_param_list`. `state` belongs to the sequence: pass the same one in each step.

    What processors may know of the model can be given, too: `vocab_size`, `eos_token_ids`, `tokenizer`.
    """

    def make(
        params: dict[str, Any],
        prompt: list[int],
        output: list[int],
        state: dict[str, Any] | None = None,
        *,
        vocab_size: int = 100,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Any = None,
        sampling_params: SamplingParams | None = None,
        rid: str = "r",
    ) -> dict[str, Any]:
        request = SimpleNamespace(
            rid=rid,
            sampling_params=sampling_params or SamplingParams(),
            origin_input_ids=prompt,
            output_ids=output,
            state={} if state is None else state,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
        )
        return {**params, "__req__": request}

    return make


@pytest.fixture(scope="session")
def sglang() -> Iterator[Callable[..., list[Any]]]:
    """SGLang's real processors: `sglang(class_name, cases, **class_attributes)`.

    A case is `{"logits": …, "rows": [{"params": …, "prompt": …, "output": …}]}`; its result is the logits
    afterwards, or the name of an exception. A class name of None asks for the names of SGLang's classes.
    """
    runner = Path(__file__).with_name("sglang_runner.py")
    with subprocess.Popen(
        [sys.executable, str(runner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(class_name: str | None, cases: list[dict[str, Any]] | None = None, **attributes: int) -> list[Any]:
            request = {"class_name": class_name, "cases": cases or [], "attributes": attributes}
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = stdout.readline()
            assert answer, "SGLang's process ended; its error is on stderr"
            results: list[Any] = json.loads(answer)
            return results

        yield run
        stdin.close()


@pytest.fixture(scope="session")
def recorded_logits() -> Callable[[Any], torch.Tensor]:
    """A function that reads logits of `rtp_llm.json`: lists, or a default value with exceptions.

    The least float32, which RTP-LLM writes where it forces or forbids, is read as -inf. See `think_mode.py` for why.
    """

    def number(value: float | str) -> float:
        return -math.inf if isinstance(value, str) else value

    def read(recorded: Any) -> torch.Tensor:
        if isinstance(recorded, list):
            return torch.tensor([[number(value) for value in row] for row in recorded], dtype=torch.float32)
        if "per_row" in recorded:
            filled = [row["default"] for row in recorded["per_row"]]
            overrides = [row["overrides"] for row in recorded["per_row"]]
        else:
            filled, overrides = [recorded["fill"]] * recorded["rows"], recorded["overrides"]
        logits = torch.tensor([[number(fill)] for fill in filled], dtype=torch.float32).repeat(1, recorded["vocab"])
        for row, values in enumerate(overrides):
            for token, value in values.items():
                logits[row, int(token)] = number(value)
        return logits

    return read


@pytest.fixture(scope="session")
def watermark_key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the secret of `WATERMARK_KEY`."""
    file = tmp_path_factory.mktemp("watermarks") / "key"
    file.write_bytes(WATERMARK_KEY.secret)
    return str(file)


@pytest.fixture(scope="session")
def zoo_models() -> dict[bool | None, ModelView]:
    """The recording's model, by its tokenizer's `add_prefix_space`; None if the tokenizer does not have it."""
    return {key: ModelView(48, frozenset({2}), tokenizer) for key, tokenizer in recorded_tokenizers().items()}


@pytest.fixture(scope="session")
def zoo_model(zoo_models: dict[bool | None, ModelView]) -> ModelView:
    """The recording's model: a vocabulary of 48 tokens, and 2 as its EOS token."""
    return zoo_models[False]


class CountingList(list[int]):
    """A list that counts the items read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        items = super().__getitem__(index)
        self.reads += len(items) if isinstance(index, slice) else 1
        return items

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()


@pytest.fixture
def counting_list() -> type[CountingList]:
    """A function that creates lists that count the items read: `reads`."""
    return CountingList
