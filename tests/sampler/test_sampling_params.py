from __future__ import annotations

from dataclasses import fields

import pytest

from logitship.sampler.sampling_params import InvalidSamplingParams, SamplingParams


def test_copy_with_other_values_shares_the_rest() -> None:
    params = SamplingParams(
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        allowed_token_ids=[9, 10],
        bad_words_token_ids=[[11, 12], [13]],
        logit_bias={14: 1.0, 15: -1.0},
    )
    copied = params.with_checked(seed=3, logprobs=2)
    assert (copied.seed, copied.logprobs) == (3, 2)
    for each in fields(SamplingParams):
        if each.name not in ("seed", "logprobs"):
            assert getattr(copied, each.name) is getattr(params, each.name)
    assert (params.seed, params.logprobs) == (None, None)


def test_copy_with_the_same_values_is_equal() -> None:
    params = SamplingParams(temperature=0.5, min_tokens=2, max_tokens=3)
    assert params.with_checked() == params


def test_unknown_logprobs_mode() -> None:
    with pytest.raises(InvalidSamplingParams, match="logprobs_mode: must be one of raw_logprobs, processed_logprobs"):
        SamplingParams(logprobs_mode="raw_logits")  # type: ignore[arg-type]
