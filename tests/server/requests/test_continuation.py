from __future__ import annotations

from logitship.server.requests.continuation import Continuation, best_continuations
from logitship.server.requests.messages import FinishReason, TokenLogprobs


def continuation(index: int, *logprobs: float, kind: str = "stop") -> Continuation:
    records = [TokenLogprobs(7, logprob, 1) for logprob in logprobs]
    reason = FinishReason("abort" if kind == "abort" else "stop")
    return Continuation(index, prompt=0, logprobs=records, finish_reason=reason)


def best(n: int, *continuations: Continuation) -> list[int]:
    return [each.index for each in best_continuations(continuations, n)]


def test_ranked_by_mean_logprob() -> None:
    short, long, worse = continuation(0, -2.0), continuation(1, -1.0, -1.0, -1.0), continuation(2, -1.5)
    assert best(3, short, long, worse) == [1, 2, 0]
    assert best(1, short, long, worse) == [1]


def test_ties_keep_their_order() -> None:
    assert best(2, continuation(0, -1.0), continuation(1, -0.5, -1.5), continuation(2, -1.0)) == [0, 1]


def test_aborted_and_empty_continuations_come_last() -> None:
    cancelled = continuation(0, -0.1, kind="abort")
    assert best(4, cancelled, continuation(1), continuation(2, float("-inf")), continuation(3, -9.0)) == [3, 1, 2, 0]
