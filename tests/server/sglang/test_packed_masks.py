"""Masks that SGLang returns as lists, packed in `meta_info`, and the edits that its scheduler records."""

from __future__ import annotations

import copy
import random
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import logitship
from logitship.client.sampling_record import SamplingEdits, SamplingRecord
from logitship.sampler.ops.top_k_top_p import kept_tokens
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship.server.sglang import hooks
from logitship.server.sglang.edit_recorder import EditRecorder
from logitship.server.sglang.packed_masks import PackedMasks, asks_for_edits, requested_masks, take_mask_fields
from logitship.server.sglang.sampled_masks import masks_of
from logitship.server.sglang.sglang_seat import ScheduledRequest
from tests.helpers.random_cases import random_seeds

VOCAB = 60
NO_EDITS = SamplingEdits.none().to_json(np.dtype("<u4"))
PACKED = {"return_sampling_mask": True, "sampling_mask_format": "packed"}


def scope(body: dict[str, Any], path: str = "/generate") -> dict[str, Any]:
    """Return the scope of an HTTP request after its body was read."""
    found = {"path": path}
    take_mask_fields(body, found)
    return found


def test_fields_that_sglang_does_not_know_are_removed() -> None:
    body = {"text": "hi", **PACKED, "return_sampling_edits": True}
    fields = requested_masks(scope(body))
    assert body == {"text": "hi", "return_sampling_mask": True}
    assert asks_for_edits(fields)
    plain = {"text": "hi", "return_sampling_mask": True}
    for other in (copy.deepcopy(plain), plain | {"sampling_mask_format": "lists"}):
        assert requested_masks(scope(other)) is None
        assert other == plain
    assert not asks_for_edits(None)


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        (PACKED, "/v1/completions", "only /generate and /v1/chat/completions return packed masks"),
        ({"sampling_mask_format": "packed"}, "/generate", "requires return_sampling_mask"),
        ({"return_sampling_edits": True}, "/generate", "requires return_sampling_mask"),
        ({"return_sampling_edits": True, "return_sampling_mask": True}, "/generate", "requires sampling_mask_format"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused(body: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requested_masks(scope(copy.deepcopy(body), path))


@pytest.mark.parametrize("are_deltas", [False, True])
def test_each_response_has_the_record_of_its_new_tokens(are_deltas: bool) -> None:
    """SGLang's lists grow, or have the new tokens alone. Behind a stop string there may be more of them."""
    masks = PackedMasks(VOCAB, lambda index: 0.5 + index, are_deltas=are_deltas)
    tokens, lists, logprobs = [5, 6, 7], [[5, 1], [6], [2, 7]], [-0.1, 0.0, -0.7]
    edits = [NO_EDITS, None, edit_of(7, 1.5)]
    records = []
    for start, end in ((0, 1), (1, 3)):
        since = start if are_deltas else 0
        meta = {
            "output_token_sampling_mask": [*lists[since:end], [9]][: end - since],
            "output_token_sampling_logprobs": logprobs[since:end],
            "sampling_edits": edits[since:end],
        }
        response = {"output_ids": tokens[since:end], "meta_info": meta}
        masks.pack(response, 1)
        records.append(SamplingRecord.from_json(meta.pop("sampling_record")))
        assert meta == {}
    joined = SamplingRecord.join(records)
    assert (joined.token_ids.tolist(), joined.temperature) == (tokens, 1.5)
    assert [np.flatnonzero(row).tolist() for row in joined.could_be_sampled()] == [sorted(each) for each in lists]
    np.testing.assert_allclose(joined.logprobs, logprobs)
    assert (joined.edits.positions.tolist(), joined.edits.tokens.tolist()) == ([2], [7])
    plain = {"output_ids": [5], "meta_info": {"id": "x"}}
    masks.pack(plain, 0)
    assert plain["meta_info"] == {"id": "x"}


def edit_of(token: int, value: float) -> dict[str, str]:
    position, kind = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    edits = SamplingEdits(position, kind, np.ones(1, np.int64), np.array([token]), np.array([value], np.float32))
    return edits.to_json(np.dtype("<u4"))


def test_edits_that_are_too_long_refuse_the_request() -> None:
    meta = {
        "output_token_sampling_mask": [[5]],
        "output_token_sampling_logprobs": [0.0],
        "sampling_edits": [{"error": "Bends changed the logits of 5000 tokens"}],
    }
    with pytest.raises(ValueError, match="Bends"):
        PackedMasks(VOCAB, lambda index: 1.0, are_deltas=False).pack({"output_ids": [5], "meta_info": meta}, 0)


class Req(SimpleNamespace):
    """Fake of SGLang's `Req`, which can be referenced weakly."""


@random_seeds(60)
def test_replay_of_the_recorded_edits(seed: int) -> None:
    """SGLang applies additive penalties, then the repetition penalty, then biases, then processors."""
    rng = random.Random(seed)
    params = SimpleNamespace(
        top_k=rng.choice([3, 10]),
        logit_bias=rng.choice([None, {"4": 1.5, "30": -2.0}]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        top_p=rng.choice([1.0, 0.9]),
        temperature=0.7,
    )
    req = Req(sampling_params=params)
    record = ScheduledRequest(weakref.ref(req), records_edits=True)
    request = TrackedRequest(record, "0", [3, 4, 5])
    request.output_token_ids += [6, 7]
    other = TrackedRequest(ScheduledRequest(weakref.ref(req)), "1", [3])
    model = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits = model.clone()
    recorder = EditRecorder({1: request, 2: other}, logits)
    logits[1, [6, 7]] -= rng.choice([0.0, 0.5])
    seen = logits[1, 3:8]
    logits[1, 3:8] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    for token, bias in (params.logit_bias or {}).items():
        logits[1, int(token)] += bias
    recorder.record(logits)
    rng.choice([lambda row: row.mul_(1.5), lambda row: row[:10].add_(0.7), lambda row: row[5:9].fill_(-torch.inf)])(
        logits[1]
    )
    recorder.record(logits)
    output = SimpleNamespace(customized_info={"others": [1, 2, 3]})
    recorder.add_to(output, 3, "edits", [1])
    assert output.customized_info["others"] == [1, 2, 3]
    first, edits, last = output.customized_info["edits"]
    assert (first, last) == (None, None)
    scaled = logits[1] / 0.7
    kept = kept_tokens(scaled, params.top_k, params.top_p).nonzero()[:, 0].tolist()
    expected = scaled[kept].log_softmax(-1)
    meta = {
        "output_token_sampling_mask": [kept],
        "output_token_sampling_logprobs": [expected[-1].item()],
        "sampling_edits": [edits],
    }
    PackedMasks(VOCAB, lambda index: 0.7, are_deltas=False).pack({"output_ids": [kept[-1]], "meta_info": meta}, 0)
    found = SamplingRecord.from_json(meta["sampling_record"])  # type: ignore[arg-type]
    replayed = logitship.replay.replay(model[1][None], found)
    assert replayed.item() == pytest.approx(expected[-1].item(), abs=1e-5)
    assert len(found.edits) <= 4  # rounding is no edit


def test_steps_without_edits_add_nothing() -> None:
    request = TrackedRequest(ScheduledRequest(weakref.ref(Req())), "0", [3])
    recorder = EditRecorder({0: request}, torch.zeros(1, 3))
    output = SimpleNamespace(customized_info=None)
    recorder.add_to(output, 1, "edits", [0])
    assert output.customized_info is None


def mask_output(rows: int, width: int, *, support: int = 0) -> Any:
    """Return a fake of SGLang's `SamplingMaskOutput` with random values."""
    return SimpleNamespace(
        token_ids=torch.randint(VOCAB, (rows, width), dtype=torch.int32),
        lengths=torch.randint(1, width + 1, (rows,), dtype=torch.int32),
        selected_logprobs=torch.rand(rows),
        statuses=torch.zeros(rows, dtype=torch.int32),
        support_logprobs=torch.rand(support, width) if support else None,
    )


@pytest.mark.parametrize(("width", "other"), [(3, 5), (5, 3), (4, 4)])
def test_mask_of_a_token_that_is_sampled_again_is_that_of_the_first_time(width: int, other: int) -> None:
    first, again = mask_output(3, width, support=2), mask_output(2, other, support=1)
    info = SimpleNamespace(
        return_sampling_masks=[True, False, True, True], sampling_support_logprobs_capture_indices=torch.tensor([0, 2])
    )
    masks = masks_of(info, SimpleNamespace(sampling_mask_output=first))
    assert {row: (mask.row, mask.support_row) for row, mask in masks.items()} == {0: (0, 0), 2: (1, None), 3: (2, 1)}
    later = SimpleNamespace(
        return_sampling_masks=[True, True], sampling_support_logprobs_capture_indices=torch.tensor([1])
    )
    kept = again.token_ids[0].tolist()
    masks[3].overwrite(masks_of(later, SimpleNamespace(sampling_mask_output=again))[1])
    length = int(again.lengths[1])
    assert length == first.lengths[2]
    assert again.token_ids[1, :length].tolist() == first.token_ids[2, :length].tolist()
    assert again.selected_logprobs[1] == first.selected_logprobs[2]
    assert again.support_logprobs[0, :length].tolist() == first.support_logprobs[1, :length].tolist()
    assert again.token_ids[0].tolist()[: len(kept)] == kept


def test_steps_without_masks() -> None:
    assert masks_of(SimpleNamespace(), SimpleNamespace(sampling_mask_output=None)) == {}
    assert masks_of(SimpleNamespace(), SimpleNamespace()) == {}


def test_edits_of_a_token_that_is_sampled_again_are_those_of_the_first_time() -> None:
    params = SimpleNamespace(top_k=5, top_p=1.0, temperature=1.0, logit_bias=None, repetition_penalty=1.0)
    req = Req(sampling_params=params)
    request = TrackedRequest(ScheduledRequest(weakref.ref(req), records_edits=True), "0", [3])
    found = []
    for is_called in (True, False):
        logits = torch.arange(20.0)[None]
        recorder = EditRecorder({0: request}, logits)
        recorder.record(logits)
        recorder.record(logits * (2 if is_called else 3))
        output = SimpleNamespace(customized_info=None)
        recorder.add_to(output, 1, "edits", [0] * is_called)
        found.append(output.customized_info["edits"])
    assert found[0] == found[1] != [None]


def test_edits_stay_beside_their_tokens() -> None:
    """A token without edits has empty ones; other requests of the batch have none."""
    updated: list[dict[str, Any]] = []

    def update(manager: None, meta_info: dict[str, Any], state: None, info: Any, index: int, reason: None) -> None:
        updated.append(info)

    info = {"sampling_edits": [[NO_EDITS], [None, None]], "others": [[1], [2, 3]], "receipts": [[], ["x"]]}
    for index in (0, 1):
        meta: dict[str, Any] = {}
        hooks.keep_receipts(update, None, meta, None, info, index, None)
        assert meta == ({"receipts": ["x"]} if index else {})
    assert updated == [{name: info[name] for name in ("sampling_edits", "others")}, {"others": info["others"]}]


def test_errors_leave_the_scheduler_running() -> None:
    req = Req(sampling_params=SimpleNamespace())  # without what the recorder reads
    request = TrackedRequest(ScheduledRequest(weakref.ref(req), records_edits=True), "0", [3])
    logits = torch.zeros(1, VOCAB)
    recorder = EditRecorder({0: request}, logits)
    recorder.record(logits)
    recorder.record(logits)
    output = SimpleNamespace(customized_info=None)
    recorder.add_to(output, 1, "edits", [0])
    assert "could not record" in output.customized_info["edits"][0]["error"]
