from __future__ import annotations

import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.warm_up import _Example, warm_up


def test_warm_up_leaves_no_trace() -> None:
    logits = torch.zeros(3, 5)
    random_numbers = torch.get_rng_state()
    warm_up(logits, ModelView(5, frozenset(), None))
    assert not logits.any()
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_vocabulary_of_one_token() -> None:
    logits = torch.zeros(1, 1)
    warm_up(logits, ModelView(1, frozenset(), None))
    assert not logits.any()


def test_example_edits_rows() -> None:
    class View:
        output_ids = (2,)

    edited = _Example()(torch.zeros(1, 3), [{"banned": [0], "__req__": View()}])
    assert edited.tolist() == [[-float("inf"), -1.0, 1.0]]
