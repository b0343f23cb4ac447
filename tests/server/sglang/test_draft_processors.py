"""The processors of a step that verifies draft tokens, on a fake of SGLang's greedy verification."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch

from logitship.server.runtime.draft_tree import DraftTree
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.sglang.forward_step import ForwardStep
from logitship.server.sglang.generate_fields import ADMITTED
from logitship.server.sglang.sglang_seat import SglangSeat, find_scheduled, scheduled
from tests.helpers.random_cases import random_seeds

from .conftest import MakeReq, NewSteps
from .fake_scheduler import EOS, VOCAB_SIZE, FakeReq

CHOICE = 5
"""The model's token."""
Draft: TypeAlias = "Callable[[FakeReq, random.Random], tuple[list[int], list[int]]]"
"""Tokens and parents of the nodes of a tree, of a request. The first is the last output token, and has parent -1."""

NOTES_TOKENS = """
from logitship import CustomLogitProcessor

class NotesTokens(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for params in custom_param_list:
            request = params["__req__"]
            if list(request.output_ids)[-1:] == [9]:
                raise RuntimeError("saw the rejected token")
        return logits
"""

UNCOPYABLE = """
from logitship import CustomLogitProcessor

class Uncopyable(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for params in custom_param_list:
            params["__req__"].state["generator"] = (each for each in ())
        return logits
"""


def tree_of(first_row: int, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """Return a tree as SGLang links it."""
    nodes = range(len(tokens))
    children = [[child for child in nodes if parents[child] == node] for node in nodes]
    first = [each[0] if each else -1 for each in children]
    siblings = [-1] * len(tokens)
    for each in children:
        for child, sibling in pairwise(each):
            siblings[child] = sibling
    return DraftTree.from_links(first_row, tokens, first, siblings)


def walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Return the nodes that a greedy verification accepts, after the root."""
    path = [0]
    while True:
        same = [n for n in range(len(tokens)) if parents[n] == path[-1] and tokens[n] == choices[path[-1]]]
        if not same:
            return path
        path.append(same[0])


class FakeVerifier:
    """Fake of SGLang's steps with draft tokens."""

    def __init__(self, steps: SglangSeat, draft: Draft, seed: int = 0) -> None:
        self._steps = steps
        self._draft = draft
        self._random = random.Random(seed)
        self.num_accepted = 0

    def run(self, *reqs: FakeReq) -> None:
        """Run requests to their ends."""
        self._prefill(reqs)
        for _ in range(200):
            running = [req for req in reqs if not req.finished()]
            if not running:
                return
            if self._random.random() < 0.1:  # SGLang retracts all, and computes their tokens again
                self._prefill(running)
            else:
                self._verify(self._random.sample(running, len(running)))

    def _prefill(self, reqs: Sequence[FakeReq]) -> None:
        """Sample a token for each request without drafts."""
        lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
        forward = SimpleNamespace(seq_lens_cpu=torch.tensor(lengths))
        logits = self._logits(len(reqs))
        rows = {row: scheduled(req) for row, req in enumerate(reqs) if req.custom_logit_processor}
        with self._steps.sampling(ForwardStep(forward)):
            self._steps.apply(logits, rows, 1)
        for req, token in zip(reqs, logits.argmax(-1).tolist(), strict=True):
            if not req.finished():
                self._take(req, [token])

    def _verify(self, reqs: Sequence[FakeReq]) -> None:
        drafts = [self._draft(req, self._random) for req in reqs]
        width = len(drafts[0][0])
        trees = [tree_of(row * width, *draft) for row, draft in enumerate(drafts)]
        rows = {row: scheduled(req) for row, req in enumerate(reqs) if req.custom_logit_processor}
        logits = self._logits(len(reqs) * width)
        self._steps.apply_to_drafts(logits, rows, trees)
        choices = logits.argmax(-1).view(-1, width).tolist()
        paths = [walk(*draft, each) for draft, each in zip(drafts, choices, strict=True)]
        accepted = [[row * width + node for node in path] + [-1] * width for row, path in enumerate(paths)]
        self._steps.take_accepted(logits, rows, accepted)
        for req, path, each in zip(reqs, paths, choices, strict=True):
            self.num_accepted += len(path) - 1
            self._take(req, [each[node] for node in path])

    def _is_stop(self, req: FakeReq, token: int) -> bool:
        return token in {EOS, *(req.sampling_params.stop_token_ids or ())}

    def _logits(self, num_rows: int) -> torch.Tensor:
        logits = torch.zeros(num_rows, VOCAB_SIZE)
        logits[:, CHOICE] = 1.0
        return logits

    def _take(self, req: FakeReq, tokens: Sequence[int]) -> None:
        """Append the accepted tokens, and finish as SGLang does."""
        limit = req.sampling_params.max_new_tokens
        stops = [index for index, token in enumerate(tokens, len(req.output_ids)) if self._is_stop(req, token)]
        req.output_ids.extend(tokens)
        if req.to_finish is not None:
            req.finished_reason, req.to_finish = req.to_finish, None
        elif stops:
            req.finished_reason, req.finished_len = "stop", min(limit, stops[0] + 1)
        elif len(req.output_ids) >= limit:
            req.finished_reason, req.finished_len = "length", limit


def random_tree(req: FakeReq, rng: random.Random) -> tuple[list[int], list[int]]:
    """Draft tokens of which some are those that the request's processor forces next, and some repeat others."""
    tokens, parents, places = [req.output_ids[-1]], [-1], [0]
    for node in range(1, 8):
        parent = rng.randrange(node)
        right = tokens[parent] + 1 if req.custom_logit_processor else CHOICE
        tokens.append(right if rng.random() < 0.6 else rng.randint(2, 8))
        parents.append(parent)
        places.append(places[parent] + 1)
    return tokens, parents


def chain(*tokens: int) -> Draft:
    """Always the same drafts, one behind the other."""
    return lambda req, rng: ([req.output_ids[-1], *tokens], list(range(-1, len(tokens))))


@random_seeds(8, shares_fixtures=True)
def test_histories_are_exact_behind_accepted_drafts(seed: int, new_steps: NewSteps, make_req: MakeReq) -> None:
    """The processor checks in each call that its history is what it forced, and that it is called once a token."""
    processors, steps = new_steps()
    rng = random.Random(seed)
    expected: dict[FakeReq, list[int]] = {}
    for number in range(6):
        tokens, first = rng.randint(1, 20), rng.randint(2, 30)
        kind = rng.choice(["plain", "runs", "runs", "fails"])
        fails_at = rng.randrange(tokens) if kind == "fails" else None
        req = make_req(str(number), tokens=tokens, first=None if kind == "plain" else first, fails_at=fails_at)
        forced = [CHOICE] * tokens if kind == "plain" else list(range(first, first + tokens))
        expected[req] = forced if fails_at is None else forced[:fails_at]
    verifier = FakeVerifier(steps, random_tree, seed)
    verifier.run(*expected)
    assert {req.rid: req.visible for req in expected} == {req.rid: tokens for req, tokens in expected.items()}
    assert verifier.num_accepted
    for req, tokens in expected.items():
        request = find_scheduled(req)
        if request is not None and req.finished_reason == "length":
            assert request.uses is not None
            assert [use.receipt.steps for use in request.uses] == [len(tokens)]
    with steps.sampling(None):  # type: ignore[arg-type]  # a later step releases the last ones
        pass
    assert processors.in_use == 0
    assert not steps._runtime._kept
    assert not steps._runtime._shipped._members


def test_error_behind_a_rejected_draft_does_not_count(steps: SglangSeat, make_req: MakeReq) -> None:
    req = make_req(tokens=6)
    req.custom_logit_processor = ADMITTED + json.dumps({"source": NOTES_TOKENS, "class_name": "NotesTokens"})
    FakeVerifier(steps, chain(9)).run(req)
    assert req.visible == [CHOICE] * 6
    assert req.finished_reason == "length"


@pytest.mark.parametrize(("draft", "num_tokens"), [(CHOICE, 2), (9, 6)], ids=["accepted", "rejected"])
def test_state_that_cannot_be_copied(
    draft: int, num_tokens: int, steps: SglangSeat, processors: PluginProcessors, make_req: MakeReq
) -> None:
    """The request ends if the draft token is accepted, after that token."""
    req = make_req(tokens=6)
    req.custom_logit_processor = ADMITTED + json.dumps({"source": UNCOPYABLE, "class_name": "Uncopyable"})
    FakeVerifier(steps, chain(draft), seed=1).run(req)
    assert req.visible == [CHOICE] * num_tokens
    assert (req.finished_reason == "length") == (draft != CHOICE)
    with steps.sampling(None):  # type: ignore[arg-type]
        pass
    assert processors.in_use == 0


def test_draft_that_ends_the_request_is_the_last_call(steps: SglangSeat, make_req: MakeReq) -> None:
    """The processor would fail in the call after it."""
    req = make_req(tokens=9, first=2, fails_at=3)
    req.sampling_params.stop_token_ids = {4}
    FakeVerifier(steps, chain(3, 4, 5)).run(req)
    assert req.finished_reason == "stop"
    assert req.visible == [2, 3, 4]


def test_drafts_that_cannot_be_followed_end_the_request(steps: SglangSeat, make_req: MakeReq) -> None:
    req = make_req()
    logits = torch.zeros(4, VOCAB_SIZE)
    steps.apply_to_drafts(logits, {0: scheduled(req)}, None)
    steps.take_accepted(logits, {0: scheduled(req)}, [[0, -1]])
    assert "verifies drafts" in req.to_finish.message
    assert not logits.any()


def test_accepted_draft_without_a_call_ends_the_request(steps: SglangSeat, make_req: MakeReq) -> None:
    """As with SGLang's simulated acceptance, which ignores the logits."""
    req = make_req(tokens=9)
    FakeVerifier(steps, chain())._prefill([req])
    logits = torch.zeros(2, VOCAB_SIZE)
    steps.apply_to_drafts(logits, {0: scheduled(req)}, [tree_of(0, [2, 40], [-1, 0])])
    steps.take_accepted(logits, {0: scheduled(req)}, [[0, 1]])
    assert "behind which no processor was called" in req.to_finish.message


def test_drafts_that_do_not_follow_the_output_end_the_request(steps: SglangSeat, make_req: MakeReq) -> None:
    req = make_req(tokens=9)
    FakeVerifier(steps, chain())._prefill([req])
    logits = torch.zeros(1, VOCAB_SIZE)
    steps.apply_to_drafts(logits, {0: scheduled(req)}, [tree_of(0, [40], [-1])])
    steps.take_accepted(logits, {0: scheduled(req)}, [[0]])
    assert "do not follow its output" in req.to_finish.message
