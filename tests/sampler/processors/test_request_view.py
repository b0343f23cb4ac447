from __future__ import annotations

import copy
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView, OutputFollower, RequestView
from logitship.sampler.sampling_params import SamplingParams


def view_of(
    prompt: list[int],
    output: list[int],
    *,
    rid: str = "r",
    sampling_params: SamplingParams | None = None,
    eos_token_ids: frozenset[int] = frozenset({1}),
    tokenizer: Any = None,
) -> RequestView:
    return RequestView(
        rid=rid,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling_params=sampling_params or SamplingParams(),
        model=ModelView(8, eos_token_ids, tokenizer),
    )


def test_view_has_sglangs_attributes() -> None:
    params, tokenizer = SamplingParams(temperature=0.5), object()
    view = view_of([3, 4], [5], rid="r7", sampling_params=params, tokenizer=tokenizer)
    assert (view.rid, view.origin_input_ids, view.output_ids) == ("r7", [3, 4], [5])
    assert (view.eos_token_ids, view.vocab_size, view.state) == ({1}, 8, {})
    assert view.sampling_params == params
    assert view.tokenizer is tokenizer


def test_sync_reads_only_new_tokens() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            Counting.read += len(found)
            return found

    output = Counting(range(1000))
    view = view_of([], output)
    follower = OutputFollower(view, output)
    for token in range(1000, 1010):
        output.append(token)
        follower.sync()
        follower.sync()
        assert view.output_ids == list(output)
    assert Counting.read == 10


def test_edits_do_not_affect_the_engine() -> None:
    prompt, output, eos = [3, 4], [5], frozenset({1})
    view = view_of(prompt, output, eos_token_ids=eos)
    follower = OutputFollower(view, output)
    view.origin_input_ids.clear()
    view.eos_token_ids.clear()
    view.output_ids += [90, 91]
    output.append(6)
    follower.sync()
    assert (prompt, output, eos) == ([3, 4], [5, 6], frozenset({1}))
    # The processor keeps its edits and still gets every new token once.
    assert view.output_ids == [5, 90, 91, 6]


def test_unused_output_is_not_followed() -> None:
    uses: list[str] = []
    output = [5]
    view = view_of([], output)
    follower = OutputFollower(view, output, lambda: uses.append("used"))
    output += [6, 7]
    assert not follower.is_used
    kept = view.output_ids
    assert kept == [5, 6, 7]
    output.append(8)
    assert kept == [5, 6, 7], "from here on, sync() is due"
    follower.sync()
    assert view.output_ids is kept
    assert kept == [5, 6, 7, 8]
    assert uses == ["used"]
    assert follower.is_used


@pytest.mark.parametrize("edit", ["view.output_ids = None", "del view.output_ids", "view.output_ids"])
def test_every_access_counts_as_use(edit: str) -> None:
    view = view_of([], [5])
    follower = OutputFollower(view, [5])
    exec(edit)
    assert follower.is_used


@pytest.mark.parametrize("is_used", [True, False])
def test_copies_of_view_and_follower_are_independent(is_used: bool) -> None:
    output, other = [5], [5, 9]
    view = view_of([], output)
    follower = OutputFollower(view, output)
    if is_used:
        view.output_ids.append(90)
    view_copy, fork = copy.deepcopy((view, follower), {id(output): output})
    fork.follow(other)
    output.append(6)
    for each in (follower, fork):
        each.sync()
    added = [90] if is_used else []
    assert view.output_ids == [5, *added, 6]
    assert view_copy.output_ids == [5, *added, 9]


@pytest.mark.parametrize("edit", ["view.output_ids = None", "view.output_ids = (5,)", "del view.output_ids"])
def test_replaced_output_is_restored_with_next_token(edit: str) -> None:
    output = [5]
    view = view_of([], output)
    follower = OutputFollower(view, output)
    exec(edit)
    follower.sync()
    output.append(6)
    follower.sync()
    assert view.output_ids == [5, 6]


def test_sampling_params_are_copied() -> None:
    params = SamplingParams(min_tokens=3)
    view = view_of([], [], sampling_params=params)
    object.__setattr__(view.sampling_params, "min_tokens", "many")
    assert params.min_tokens == 3


def test_each_view_has_its_own_state() -> None:
    first, second = view_of([], []), view_of([], [])
    first.state["seen"] = True
    assert second.state == {}


def test_attributes_may_be_added() -> None:
    """As on SGLang's `Req`."""
    view: Any = view_of([], [])
    view.calls = getattr(view, "calls", 0) + 1
    assert copy.deepcopy(view).calls == 1
    with pytest.raises(AttributeError, match="__req__ has no attribute 'others'"):
        view.others += 1
