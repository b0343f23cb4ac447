"""`generate()` with processors in sandboxes, against the same classes in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

from logitship.client.errors import ProcessorFault
from logitship.server.tokenizer import Tokenizer
from logitship.server.transformers import ShippedLogitsProcessor
from logitship.server.transformers.generate_seat import TransformersSettings
from tests.conftest import tiny_model
from tests.helpers.processors import CHECKS_HISTORY, shipped_by_row

EOS = 1
Make = Callable[..., ShippedLogitsProcessor]
HASHES = shipped_by_row(
    "Hashes",
    """
    # Depends on the whole history, and on the number of calls for this sequence.
    calls = req.state["calls"] = req.state.get("calls", 0) + 1
    generator = torch.Generator().manual_seed(hash((calls, *req.origin_input_ids, *req.output_ids)) % (1 << 31))
    row += torch.randn(row.shape, generator=generator)
    """,
)


class Hashes(LogitsProcessor):
    """The same in this process."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        edited = scores.clone()
        for row, ids in zip(edited, input_ids.tolist(), strict=True):
            calls = len(ids) - self._length + 1
            generator = torch.Generator().manual_seed(hash((calls, *ids)) % (1 << 31))
            row += torch.randn(row.shape, generator=generator)
        return edited


def string(source: Any) -> dict[str, Any]:
    return {"source": source.source, "class_name": source.class_name}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    model = tiny_model()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def make(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Iterator[Make]:
    made: list[ShippedLogitsProcessor] = []

    def new(*processors: Any, **options: Any) -> ShippedLogitsProcessor:
        options.setdefault("settings", TransformersSettings(processor_isolation="none"))
        made.append(ShippedLogitsProcessor(model, tokenizer.hf_tokenizer, processors, **options))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
        {"num_beams": 3, "do_sample": True},
    ],
    ids=str,
)
def test_same_tokens_as_in_this_process(model: LlamaForCausalLM, make: Make, options: dict[str, Any]) -> None:
    prompts = torch.randint(4, 260, (3, 5), generator=torch.Generator().manual_seed(0))
    processor = make({"processor": string(HASHES)})
    for _ in range(2):
        outputs = []
        for each in (Hashes(5), processor):
            torch.manual_seed(7)
            outputs.append(model.generate(prompts, logits_processor=[each], max_new_tokens=12, **options))
        assert torch.equal(*outputs)
    assert processor._worker.processors.in_use > 0
    processor._release()
    assert processor._worker.processors.in_use == 0
    assert not processor._runtime._kept


def test_each_prompt_has_its_parameters_and_no_padding(model: LlamaForCausalLM, make: Make) -> None:
    prompts = torch.tensor([[0, 0, 7, 7, 7], [7, 7, 7, 7, 7]])
    params = [{"first": 10, "prompt": 3}, {"first": 50, "prompt": 5}]
    processor = make({"processor": string(CHECKS_HISTORY)}, params=params)
    mask = (prompts != 0).long()
    output = model.generate(prompts, attention_mask=mask, logits_processor=[processor], max_new_tokens=6)
    assert output[:, 5:].tolist() == [list(range(10, 16)), list(range(50, 56))]


def test_processor_is_not_called_after_the_end(model: LlamaForCausalLM, make: Make) -> None:
    """The row that has ended is padded, while the other one goes on."""
    params = [{"first": EOS - 0, "prompt": 2, "fails_at": 1}, {"first": 50, "prompt": 2}]
    processor = make({"processor": string(CHECKS_HISTORY)}, params=params)
    output = model.generate(torch.full((2, 2), 7), logits_processor=[processor], max_new_tokens=4)
    assert output[:, 2:].tolist() == [[EOS, 0, 0, 0], [50, 51, 52, 53]]


def test_fault_is_raised_and_the_next_call_works(model: LlamaForCausalLM, make: Make) -> None:
    processor = make({"processor": string(CHECKS_HISTORY), "params": {"first": 10, "prompt": 2, "fails_at": 2}})
    prompt = torch.full((1, 2), 7)
    for _ in range(2):
        with pytest.raises(ProcessorFault, match="raised RuntimeError: requested"):
            model.generate(prompt, logits_processor=[processor], max_new_tokens=4)
        assert processor._worker.processors.in_use == 0
    assert model.generate(prompt, logits_processor=[processor], max_new_tokens=2)[0, 2:].tolist() == [10, 11]


def test_processors_by_name_and_in_order(model: LlamaForCausalLM, make: Make) -> None:
    forced = {"processor": string(CHECKS_HISTORY), "params": {"first": 10, "prompt": 1, "others": -1.0}}
    banned = {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [10]}}
    processor = make(forced, banned)
    output = model.generate(torch.full((1, 1), 7), logits_processor=[processor], max_new_tokens=1)
    assert output[0, 1] != 10
    with pytest.raises(ValueError, match="logits_processors"):
        make("no processor")


def test_processor_of_every_request_runs_last(model: LlamaForCausalLM, make: Make) -> None:
    forced = {"processor": string(CHECKS_HISTORY), "params": {"first": 10, "prompt": 1, "others": -1.0}}
    banned = 'disallowed_tokens={"token_ids": [10]}'
    processor = make(forced, settings=TransformersSettings(processor_isolation="none", default_processor=[banned]))
    output = model.generate(torch.full((1, 1), 7), logits_processor=[processor], max_new_tokens=1)
    assert output[0, 1] != 10


@pytest.mark.slow
def test_runs_in_a_sandbox(model: LlamaForCausalLM, make: Make) -> None:
    processor = make({"processor": string(HASHES)}, settings=TransformersSettings(sandbox_first_step_timeout=60.0))
    prompts = torch.randint(4, 260, (2, 4), generator=torch.Generator().manual_seed(1))
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    output = model.generate(prompts, logits_processor=[processor], **options)
    assert torch.equal(output, model.generate(prompts, logits_processor=[Hashes(4)], **options))
