from __future__ import annotations

from collections.abc import Callable

import pytest

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import ModelRunner
from logitship.server.model.step_cost import StepCost, measure_passes, measure_step_cost
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.ngram_speculation import NGramSpeculation
from logitship.server.tokenizer import Tokenizer


def sequence(tokenizer: Tokenizer, prompt: list[int], output: list[int], max_tokens: int = 100) -> Sequence:
    made = Sequence("r", 0, frozenset(), prompt, SamplingParams(), max_tokens, tokenizer, lambda chunk: None)
    made.output_token_ids += output
    return made


def cost(fixed: float) -> Callable[[int], float]:
    """Return the cost of a step: a fixed part, and 1 for each token."""
    return lambda num_tokens: fixed + num_tokens


@pytest.fixture
def repeating(tokenizer: Tokenizer) -> Sequence:
    return sequence(tokenizer, [10, 11, 12, 13, 14, 15] * 4, [10, 11, 12, 13, 14, 15] * 4)


def test_likely_sequence_gets_the_drafts(tokenizer: Tokenizer, repeating: Sequence) -> None:
    plain = sequence(tokenizer, list(range(10, 50)), [50])
    drafts = NGramSpeculation(8, cost(12.0)).drafts([plain, repeating])
    assert list(drafts) == [repeating]
    assert drafts[repeating] == [10, 11, 12, 13, 14, 15, 10, 11]


def test_no_draft_beyond_the_end(tokenizer: Tokenizer) -> None:
    for left in range(1, 6):
        almost_done = sequence(tokenizer, [10, 11, 12] * 9, [10, 11], 2 + left)
        drafts = NGramSpeculation(8, cost(100.0)).drafts([almost_done])
        assert len(drafts.get(almost_done, [])) == left - 1


def test_full_batch_has_fewer_drafts(tokenizer: Tokenizer) -> None:
    # Each first token is accepted in two of five cases: useful where a step costs far more than a token.
    half_likely = [sequence(tokenizer, [10, 11, 12 + row, 13, 10, 11], []) for row in range(32)]
    assert all(NGramSpeculation(4, cost(12.0)).drafts(half_likely[:1]).values())
    assert NGramSpeculation(4, cost(12.0)).drafts(half_likely) == {}
    assert len(NGramSpeculation(4, cost(1000.0)).drafts(half_likely)) == 32


def test_number_of_drafts_maximizes_the_rate(tokenizer: Tokenizer, repeating: Sequence) -> None:
    """Compare with all numbers of drafts for two sequences."""
    other = sequence(tokenizer, [20, 21, 22, 23, 20, 21], [])
    for free in (1.0, 3.0, 12.0, 50.0):
        speculation = NGramSpeculation(6, cost(free))
        drafts = speculation.drafts([repeating, other])

        def rate(first: int, second: int, speculation: NGramSpeculation = speculation, free: float = free) -> float:
            chances = [
                speculation.lookup(each).probability(index)
                for each, count in ((repeating, first), (other, second))
                for index in range(count)
            ]
            return (2 + sum(chances)) / (free + 2 + len(chances))

        best = max(rate(first, second) for first in range(7) for second in range(7))
        assert rate(len(drafts.get(repeating, [])), len(drafts.get(other, []))) == pytest.approx(best)


def test_slow_numbers_of_tokens_are_avoided(tokenizer: Tokenizer) -> None:
    """As on a CPU, where matrix libraries are slow with two or three rows."""
    repeating = sequence(tokenizer, [10, 11, 12, 13] * 8, [])
    seconds = {1: 1.0, 2: 4.0, 3: 4.0, 4: 1.2, 5: 1.2, 6: 9.0}
    drafts = NGramSpeculation(8, lambda num_tokens: seconds.get(num_tokens, 9.0)).drafts([repeating])
    assert len(drafts[repeating]) == 4


def test_costly_drafts_stop_and_are_tried_again(tokenizer: Tokenizer) -> None:
    likely = [sequence(tokenizer, [10, 11, 12 + row, 13, 10, 11], []) for row in range(4)]
    speculation = NGramSpeculation(1, cost(1000.0))
    assert len(speculation.drafts(likely)) == 4
    for _ in range(50):
        speculation.observe(4, 0, 0, 1004.0)
        speculation.observe(4, 4, 4, 2 * 1008.0)
    assert speculation.drafts(likely) == {}
    steps = next(step for step in range(500) if speculation.drafts(likely) or speculation.observe(4, 0, 0, 1004.0))
    assert 16 < steps < 300
    for _ in range(50):
        speculation.observe(4, 4, 4, 1008.0)
    speculation.observe(4, 0, 0, 1004.0)
    assert len(speculation.drafts(likely)) == 4
    assert len(speculation.drafts(likely[:1])) == 1, "another size of the batch"


def test_one_slow_step_does_not_stop_drafts(tokenizer: Tokenizer) -> None:
    likely = sequence(tokenizer, [10, 11, 12, 13, 10, 11], [])
    speculation = NGramSpeculation(1, cost(1000.0))
    for _ in range(20):
        speculation.observe(1, 0, 0, 1001.0)
        speculation.observe(1, 1, 1, 1002.0)
    speculation.observe(1, 1, 1, 60_000.0)
    assert len(speculation.drafts([likely])) == 1


def test_some_steps_are_plain_if_drafts_promise_little(tokenizer: Tokenizer) -> None:
    """Otherwise a machine that has become faster would not be noticed: only steps with drafts would be measured."""
    likely = [sequence(tokenizer, [10, 11, 12 + row, 13, 10, 11], []) for row in range(4)]
    speculation = NGramSpeculation(1, cost(100.0))

    def step(seconds_of_plain: float) -> int:
        num_drafts = sum(map(len, speculation.drafts(likely).values()))
        speculation.observe(4, num_drafts, num_drafts, 200.0 if num_drafts else seconds_of_plain)
        return num_drafts

    speculation.observe(4, 0, 0, 200.0)
    before = [step(200.0) for _ in range(100)]
    assert before.count(4) > 90
    assert before.count(0) >= 5
    after = [step(100.0) for _ in range(300)]
    assert after[-100:].count(0) > 90


def test_every_step_has_drafts_if_they_promise_much(tokenizer: Tokenizer, repeating: Sequence) -> None:
    speculation = NGramSpeculation(8, cost(100.0))
    for _ in range(100):
        num_drafts = sum(map(len, speculation.drafts([repeating]).values()))
        assert num_drafts >= 7
        speculation.observe(1, num_drafts, num_drafts, 101.0 + num_drafts)


def test_rejected_drafts_stop_and_are_tried_again(tokenizer: Tokenizer) -> None:
    likely = [sequence(tokenizer, [10, 11, 12 + row, 13, 10, 11], []) for row in range(4)]
    speculation = NGramSpeculation(1, cost(100.0))
    drafted = []
    for _ in range(1000):
        drafted.append(sum(map(len, speculation.drafts(likely).values())))
        speculation.observe(4, drafted[-1], 0, 104.0 + drafted[-1])
    assert drafted[:10] == [4] * 10
    assert 0 < sum(map(bool, drafted[500:])) < 150
    assert len(speculation.drafts(likely[:1])) == 1, "another size of the batch"


def test_step_cost_is_interpolated() -> None:
    seconds = StepCost({1: 1.0, 3: 3.0, 5: 2.0, 9: 4.0})
    assert [seconds(number) for number in (1, 2, 3, 4, 5, 7, 9, 13)] == [1.0, 2.0, 3.0, 2.5, 2.0, 3.0, 4.0, 6.0]


def test_measure_step_cost(loaded_model: LoadedModel) -> None:
    runner = ModelRunner(loaded_model.model, 2, 40)
    seconds = measure_step_cost(runner, 1000)
    assert all(0 < seconds(number) < 10 for number in (1, 2, 8, 33, 40, 400))


def test_measure_passes(loaded_model: LoadedModel) -> None:
    passes = measure_passes(ModelRunner(loaded_model.model, 2, 40), [1, 40, 41])
    assert passes.keys() == {1, 40}, "longer than a sequence"
    assert all(0 < seconds < 10 for seconds in passes.values())
