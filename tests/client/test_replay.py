from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from logitship.client.replay import collate, replay, report
from logitship.client.sampling_record import ADD, SCALE, SET, SamplingRecord
from tests.client.test_sampling_record import random_record
from tests.helpers.random_cases import random_seeds


def reference(logits: torch.Tensor, record: SamplingRecord) -> torch.Tensor:
    """Do the same in plain operations on whole rows."""
    allowed = torch.from_numpy(record.could_be_sampled())
    logits = (
        torch.stack([edited(row, record, position) for position, row in enumerate(logits)]) if len(logits) else logits
    )
    masked = (logits / record.temperature).masked_fill(~allowed, -torch.inf)
    return masked.log_softmax(-1).gather(-1, torch.from_numpy(record.token_ids)[:, None])[:, 0]


def edited(row: torch.Tensor, record: SamplingRecord, position: int) -> torch.Tensor:
    """Make the edits of one token, one after the other."""
    edits, tokens, values = record.edits, iter(record.edits.tokens.tolist()), iter(record.edits.values.tolist())
    for at, kind, length, count in zip(edits.positions, edits.kinds, edits.lengths, edits.num_values, strict=True):
        of_edit = [next(tokens) for _ in range(length)] or list(range(len(row)))
        factors = torch.tensor([next(values) for _ in range(count)], dtype=row.dtype)
        if at != position:
            continue
        old = row[of_edit]
        if kind == ADD:
            new = old + factors
        elif kind == SCALE:
            new = old * factors
        elif kind == SET:
            new = factors.expand_as(old)
        else:
            new = torch.where(old > 0, old / factors, old * factors)
        row = row.index_put((torch.tensor(of_edit),), new)
    return row


def sampled(record: SamplingRecord, rng: random.Random) -> SamplingRecord:
    """Replace the tokens by ones that their masks allow."""
    tokens = [rng.choice(np.flatnonzero(mask).tolist()) for mask in record.could_be_sampled()]
    return SamplingRecord(**{**vars(record), "token_ids": np.array(tokens, np.int64)})


def make_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


@random_seeds(20)
def test_log_probabilities_and_gradients_are_those_of_masked_logits(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size, longest = rng.choice([9, 40]), rng.randrange(1, 7)
    records = [sampled(random_record(rng, vocab_size, rng.randrange(longest + 1)), rng) for _ in range(4)]
    logits = make_logits(4, longest, vocab_size, seed=seed)
    weights = torch.rand(4, longest, dtype=torch.float64)
    found = replay(logits, collate(records, longest))
    (found * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    expected = torch.zeros(4, longest, dtype=torch.float64)
    for row, record in enumerate(records):
        expected[row, : len(record)] = reference(logits[row, : len(record)], record)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, logits.grad)
    for row, record in enumerate(records):
        if len(record):
            torch.testing.assert_close(replay(logits[row, : len(record)], record), found[row, : len(record)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_at_least_float32(dtype: torch.dtype) -> None:
    record = sampled(random_record(random.Random(1), 40, 5), random.Random(1))
    logits = make_logits(5, 40).detach().to(dtype)
    found = replay(logits, record)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference(logits.float(), record))


def _replay_shards(rank: int, folder: Path, count: int) -> None:
    rng = random.Random(3)
    records = [sampled(random_record(rng, 40, length), rng) for length in (3, 0, 5)]
    logits = make_logits(3, 5, 40)
    with torch.no_grad():
        logits[0, 0, :20] = -torch.inf  # the first process has nothing of this token
        records[0].removed[: records[0].lengths[0] if records[0].forms[0] == 1 else 0] = 39
    start, end = 40 * rank // count, 40 * (rank + 1) // count
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    part = logits[..., start:end].detach().requires_grad_()
    found = replay(part, collate(records), offset=start, group=torch.distributed.group.WORLD)
    found.exp().sum().backward()
    whole = replay(logits, collate(records))
    whole.exp().sum().backward()
    assert logits.grad is not None
    assert part.grad is not None
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(part.grad, logits.grad[..., start:end])
    torch.distributed.destroy_process_group()


def test_parts_of_the_vocabulary(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(partial(_replay_shards, folder=tmp_path, count=2), nprocs=2)


def test_report_tells_numerics_from_masks() -> None:
    rng = random.Random(4)
    records = [sampled(random_record(rng, 40, 6), rng) for _ in range(2)]
    logits = make_logits(2, 6, 40).detach()
    exact = [
        SamplingRecord(**{**vars(record), "logprobs": replay(logits[row], record).float().numpy()})
        for row, record in enumerate(records)
    ]
    found = report(logits, collate(exact))
    assert found.num_tokens == 12
    assert found.ratio == pytest.approx(1, abs=1e-6)
    assert found.largest < 1e-6
    assert found.largest_without > 0.1
    assert "12 tokens: importance ratio 1.00000 with the record" in str(found)


def test_batches_that_are_refused() -> None:
    rng = random.Random(5)
    record = random_record(rng, 40, 3)
    with pytest.raises(ValueError, match="of one vocabulary"):
        collate([record, random_record(rng, 41, 3)])
    with pytest.raises(ValueError, match="at least one"):
        collate([])
    with pytest.raises(ValueError, match=r"see SamplingRecord\.join"):
        collate([random_record(rng, 40, 3, start=1)])
    with pytest.raises(ValueError, match="length: 2, and a record has 3 tokens"):
        collate([record], 2)
    with pytest.raises(ValueError, match=r"expected shape \(1, 3, 40\), got \(1, 4, 40\)"):
        replay(make_logits(4, 40), record)
