from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.guarded_processor import GuardedProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.slot_adapter import SlotAdapter
from logitship.sampler.batch_processors.slot_interface import (
    LogitsContext,
    LogitsProcRequestState,
    SlotLogitsProcessor,
)
from logitship.sampler.batch_processors.vllm_config import VllmConfig, vllm_config
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

CPU = torch.device("cpu")
SLOTS, LENGTH, VOCAB = 8, 64, 5


class History(SlotLogitsProcessor):
    """Writes what it knows about each row's request into its logits: its number, its slot, and its tokens."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.states = req_states
        self.numbers = torch.full((req_states.max_num_reqs,), -1.0)
        self.staged: dict[int, float] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        arguments = sampling_params.extra_args or {}
        if arguments.get("fail") == "add":
            raise KeyError("number")
        self.staged[req_idx] = arguments["number"]
        return True

    def apply_staged_writes(self) -> None:
        for slot, number in self.staged.items():
            self.numbers[slot] = number
        self.staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping
        assert slots.tolist() == ctx.idx_mapping.tolist() == ctx.idx_mapping_np.tolist()
        assert ctx.expanded_local_pos.tolist() == [0] * len(slots)
        assert (self.numbers[slots] < 1e6).all(), "this request makes it fail"
        result = torch.empty_like(logits)
        for row, slot in enumerate(slots.tolist()):
            length = int(self.states.total_len.gpu[slot])
            tokens = self.states.all_token_ids.gpu[slot, :length].tolist()
            assert (length, tokens[-1]) == (int(ctx.pos[row]) + 1, int(ctx.input_ids[row]))
            assert length == ctx.seq_lens_upper_bound_np[row]
            prompt, prefill = (int(each.np[slot]) for each in (self.states.prompt_len, self.states.prefill_len))
            result[row] = torch.tensor([self.numbers[slot], slot, fingerprint(tokens), prompt, prefill])
        return result


def fingerprint(tokens: list[int]) -> int:
    return sum(place * token for place, token in enumerate(tokens, 1))


def config(speculative: int | None = None) -> VllmConfig:
    return vllm_config(
        model="tiny",
        vocab_size=VOCAB,
        max_model_len=LENGTH,
        max_num_seqs=SLOTS,
        device=CPU,
        dtype=torch.float32,
        num_speculative_tokens=speculative,
    )


def adapter() -> SlotAdapter:
    return SlotAdapter(History, config(), CPU)


def added(row: int, number: int, prompt: list[int], output: list[int]) -> Any:
    return row, SamplingParams(extra_args={"number": number}), prompt, output


@pytest.mark.slow
@random_seeds(5, shares_fixtures=True)
def test_slots_and_tokens_follow_a_random_batch(seed: int, new_request: Callable[..., Any]) -> None:
    """Compared with the batch itself; some requests make the processor fail, and some steps call it for a part."""
    rng = random.Random(seed)
    batch: PersistentBatch[Any] = PersistentBatch(SLOTS)
    guarded = GuardedProcessor(adapter(), "history")
    slot_of: dict[int, int] = {}
    prefill: dict[int, int] = {}
    number = num_faults = num_parts = 0
    for _ in range(300):
        for member in batch.members:
            if rng.random() < 0.15:
                batch.remove(member)
        while len(batch) < SLOTS and rng.random() < 0.6:
            number += 1
            failure = rng.choice([{}, {}, {}, {}, {"fail": "add"}, {"number": 2_000_000}])
            params = SamplingParams(extra_args={"number": number} | failure)
            prompt, output = ([rng.randrange(9) for _ in range(rng.randrange(1, 9))] for _ in range(2))
            prefill[number] = len(prompt) + len(output)
            batch.add(new_request(f"r{number}", params, prompt, output))
        batch.condense()
        if len(batch) > 1 and rng.random() < 0.3:
            batch.swap(*rng.sample(range(len(batch)), 2))
        guarded.update_state(batch.commit())
        rows = [row for row in range(len(batch)) if rng.random() < 0.7] if rng.random() < 0.3 else None
        if rows is None:
            rows = list(range(len(batch)))
            logits = guarded.apply(torch.full((len(batch), VOCAB), -7.0))
        else:
            chosen = [int(row in rows) for row in range(len(batch))]
            logits = guarded.apply_with_spec_decode(torch.full((len(rows), VOCAB), -7.0), chosen)
            num_parts += 1
        faults = dict(guarded.take_faults())
        num_faults += len(faults)
        for place, row in enumerate(rows):
            member = batch.members[row]
            arguments = member.sampling_params.extra_args
            fails = arguments.get("fail") == "add" or arguments["number"] > 1_000_000
            assert (row in faults) == fails
            if fails:
                assert logits[place].tolist() == [-7.0] * VOCAB
                continue
            found, slot, *history = logits[place].tolist()
            tokens = [*member.prompt_token_ids, *member.output_token_ids]
            assert found == arguments["number"]
            assert history[:2] == [fingerprint(tokens), len(member.prompt_token_ids)]
            if not num_faults:  # recovery from a fault adds all requests again
                assert history[2] == prefill[arguments["number"]]
                assert slot_of.setdefault(arguments["number"], slot) == slot
        for row, member in enumerate(batch.members):
            if row in faults:
                batch.remove(member)
            else:
                member.output_token_ids.append(rng.randrange(9))
                if len(member.output_token_ids) > 40:
                    batch.remove(member)
    assert num_faults > 50
    assert num_parts > 50


def test_request_keeps_its_slot_while_its_row_moves() -> None:
    slots = adapter()
    slots.update_state(BatchUpdate(3, [], [added(row, row, [1], []) for row in range(3)], []))
    assert slots.apply(torch.zeros(3, VOCAB))[:, :2].tolist() == [[0, 0], [1, 1], [2, 2]]
    update: Any = BatchUpdate(2, [0], [], [(2, 0, "unidirectional")])
    slots.update_state(update)
    assert slots.apply(torch.zeros(2, VOCAB))[:, :2].tolist() == [[2, 2], [1, 1]]
    slots.update_state(BatchUpdate(3, [], [added(2, 3, [4, 5], [6])], []))
    assert slots.apply(torch.zeros(3, VOCAB)).tolist()[2] == [3, 0, 4 + 10 + 18, 2, 3]


def test_tokens_of_this_step_are_there_without_an_update() -> None:
    slots, output = adapter(), [3]
    slots.update_state(BatchUpdate(1, [], [added(0, 0, [2], output)], []))
    output.append(4)
    assert slots.apply(torch.zeros(1, VOCAB))[0, 2] == fingerprint([2, 3, 4])


def test_without_requests_the_processor_is_not_called() -> None:
    slots = adapter()
    slots.update_state(None)
    assert slots.apply(torch.ones(1, VOCAB)).tolist() == [[1.0] * VOCAB]
