from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.edits import merged_edits
from logitship.sampler.edits.edit_codec import VectorSender, VectorStore, decode, encode
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.edits.merged_edits import apply_edits
from tests.builtin_processors.test_without_sync import META, Copies, NoWaitingButCopies
from tests.helpers.random_cases import examples

from .random_edits import VOCAB, logs, logs_by_row, one_by_one, same_but_nan


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu", [True, False])
@examples(400)
@given(st.data())
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_merged_edits_are_those_of_each_call(on_cpu: bool, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(sum(sizes) + 1)))
    logits = torch.randn(sum(sizes) + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    groups = []
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        rows: Any = range(first, first + size) if data.draw(st.booleans()) and order[0] == 0 else None
        rows = list(order[first : first + size]) if rows is None and order[0] != 0 else range(first, first + size)
        log = data.draw(st.one_of(logs(size), logs_by_row(size)))
        groups.append((rows, decode(encode(log, VectorSender()), size, VOCAB, VectorStore(VOCAB))))
        part = expected[list(rows)].clone()
        one_by_one(log.edits, part)
        expected[list(rows)] = part
    # The operations of a GPU give the same on the CPU.
    with patch.object(merged_edits, "is_cpu", lambda logits: on_cpu):
        apply_edits(logits, groups)
    assert same_but_nan(logits, expected)


def all_edits() -> EditLog:
    """Return a log with edits of all kinds, on rows that are not adjacent."""
    log = EditLog(5, VOCAB)
    vector = torch.randn(VOCAB)
    log.put([1, 2 * VOCAB], -math.inf)
    log.edit_positions([VOCAB, 1], [("-", vector[:2].numpy())])
    register = log.save([3, 4])
    log.fill([0, 2], 1.5)
    log.restore([3, 4], register, [("*", 2.0), ("/", vector[:2].numpy())])
    log.restore([2 * VOCAB, 5], log.save([2 * VOCAB, 5]), [("+", 2.0), ("*", vector[:2].numpy())])
    log.edit_rows([0, 2, 3], "/", 0.7)
    log.edit_rows([0, 2], "-", vector.numpy())
    log.put_rows([1, 4], vector.numpy())
    log.put_mask([0, 4], vector > 0, -math.inf)
    log.put_mask([1, 3], torch.stack((vector, -vector)) > 0, -math.inf)
    return log


def test_edits_do_not_synchronize() -> None:
    log = all_edits()
    edits = decode(encode(log, VectorSender()), 5, VOCAB, VectorStore(VOCAB))
    copies = Copies()
    with NoWaitingButCopies(), copies:
        apply_edits(torch.empty(6, VOCAB, device=META), [([0, 2, 4, 5, 1], edits)])
    assert copies.seen
    assert set(copies.seen) == {(True, True)}
