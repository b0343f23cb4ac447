from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitship.builtin_processors.parts.target_token import TargetToken
from tests.builtin_processors.conftest import MakeRow

CountingList = Callable[..., Any]


def test_due_until_sampled(make_row: MakeRow) -> None:
    target, state = TargetToken(5, None), dict[str, Any]()
    outputs: list[list[int]] = [[], [1], [1, 5], [1, 5, 2]]
    assert [target.is_due(make_row({}, [5], output, state), "key") for output in outputs] == [True, True, False, False]


def test_due_after_some_tokens(make_row: MakeRow) -> None:
    target, state = TargetToken(5, frozenset({6, 4})), dict[str, Any]()
    outputs = [[1, 6, 2, 4, 5, 6][:length] for length in range(7)]
    due = [target.is_due(make_row({}, [6], output, state), "key") for output in outputs]
    assert due == [True, False, True, False, True, False, False]


def test_step_only_reads_new_tokens(make_row: MakeRow, counting_list: CountingList) -> None:
    target, prompt, output = TargetToken(5, frozenset({6})), counting_list([1] * 5000), counting_list([1] * 5000)
    row = make_row({}, prompt, output)
    target.is_due(row, "key")
    prompt.reads = output.reads = 0
    for _ in range(100):
        output.append(1)
        target.is_due(row, "key")
    assert prompt.reads == 0
    assert output.reads <= 300
