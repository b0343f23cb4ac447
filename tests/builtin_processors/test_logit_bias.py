from __future__ import annotations

import torch

from logitship.builtin_processors.logit_bias import LogitBiasLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.sampling_params import SamplingParams


def test_each_row_gets_its_own_biases() -> None:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    first, second = SamplingParams(logit_bias={0: 1.5, 3: -2.0}), SamplingParams(logit_bias={3: 7.0})
    processor.update_state(BatchUpdate(3, [], [(0, first, [], []), (2, second, [], [])], []))
    assert processor.apply(torch.ones(3, 4)).tolist() == [
        [2.5, 1.0, 1.0, -1.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 8.0],
    ]


def test_no_biases_is_a_noop() -> None:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    processor.update_state(None)
    assert processor.apply(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    assert not processor.is_argmax_invariant()
