from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.edits.edit_codec import VectorSender, VectorStore, decode, encode
from logitship.sampler.edits.merged_edits import apply_edits
from tests.helpers.other_device import other_device
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
    if on_cpu:
        apply_edits(logits, groups)
    else:
        with other_device() as device:
            on_device = device.put(logits)
            apply_edits(on_device, groups)
            assert not device.waits
            logits = on_device.cpu()
    assert same_but_nan(logits, expected)
