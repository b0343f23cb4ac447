from __future__ import annotations

import pytest
import torch

from logitship.sampler.ops.rows import Scratch


def rows(scratch: Scratch, start: int, count: int, columns: int) -> torch.Tensor:
    found = scratch.rows(start, count, torch.empty(1, columns))
    assert found is not None
    return found


def test_rows_are_separate_and_reused() -> None:
    scratch = Scratch()
    whole = rows(scratch, 0, 5, 7).fill_(0.0)
    first, second = rows(scratch, 0, 2, 7).fill_(1.0), rows(scratch, 2, 3, 7).fill_(2.0)
    assert whole.tolist() == [*[[1.0] * 7] * 2, *[[2.0] * 7] * 3]
    assert (first.shape, second.shape) == ((2, 7), (3, 7))
    assert rows(scratch, 0, 5, 7).data_ptr() == whole.data_ptr()
    assert rows(scratch, 0, 7, 5).is_contiguous()


def test_rows_survive_buffer_growth() -> None:
    scratch = Scratch()
    first = rows(scratch, 0, 2, 3).fill_(1.0)
    rows(scratch, 2, 5, 3).fill_(2.0)
    assert first.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("mode", [True, False])
def test_buffer_works_across_inference_modes(mode: bool) -> None:
    scratch = Scratch()
    logits = torch.randn(2, 3)
    for each in (mode, not mode):
        with torch.inference_mode(each):
            found = torch.log_softmax(logits, dim=-1, out=rows(scratch, 0, 2, 3))
        assert torch.equal(found, logits.log_softmax(dim=-1))


def test_other_devices_get_no_buffer() -> None:
    assert Scratch().rows(0, 1, torch.empty(1, 3, device="meta")) is None
