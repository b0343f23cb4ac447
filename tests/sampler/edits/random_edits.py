"""Random edit logs, and a slow way to apply them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from logitship.sampler.edits.edit_operations import ARITHMETIC, Edit
from logitship.sampler.edits.logit_edits import EditLog
from tests.sampler.promised_logits.promised import bits

VOCAB = 21
OPERATORS = tuple(ARITHMETIC)
NUMBERS = st.sampled_from([0.0, -0.0, 1.5, -math.inf, math.inf, math.nan, 0.1, -3e38])


@st.composite
def logs_by_row(draw: st.DrawFn, rows: int) -> EditLog:
    """Draw a log that does the same with some rows, one after the other or step by step, and a few other edits."""
    log = EditLog(rows, VOCAB)
    operator, number = draw(st.sampled_from(OPERATORS)), draw(NUMBERS)
    vector = torch.randn(VOCAB, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    numbers = draw(st.sampled_from([(number, number), (number, 0.5)]))
    registers: dict[int, int] = {}

    def positions(row: int) -> list[int]:
        return [row * VOCAB + 3, row * VOCAB + 1 + row % 2]

    steps: list[Callable[[int], object]] = [
        lambda row: log.put(positions(row), numbers[row % 2]),
        lambda row: log.fill([row], numbers[row % 2]),
        lambda row: registers.update({row: log.save(positions(row))}),
        lambda row: row in registers and log.restore(positions(row), registers[row]),
        lambda row: (
            row in registers and log.restore(positions(row), registers[row], [(operator, (vector[:2] * row).numpy())])
        ),
        lambda row: (
            row in registers and log.restore(positions(row)[::-1], registers[row], [(operator, numbers[row % 2])])
        ),
        lambda row: log.edit_rows([row], operator, numbers[row % 2]),
        lambda row: log.edit_rows([row], operator, vector.numpy()),
        lambda row: log.put_rows([row], vector.numpy()),
        lambda row: log.put_mask([row], vector > 0, number),
    ]
    program = draw(st.lists(st.sampled_from(steps), max_size=6))
    order = draw(st.permutations(range(rows)))
    if draw(st.booleans()):
        for step in program:
            for row in draw(st.permutations(order)):
                step(row)
    else:
        for row in order:
            for step in program:
                step(row)
    return log


@st.composite
def logs(draw: st.DrawFn, rows: int) -> EditLog:
    """Draw a log with edits of all kinds."""
    log = EditLog(rows, VOCAB)
    registers: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.integers(0, 8))
        count = draw(st.integers(1, 5))
        unique = draw(st.lists(st.integers(0, rows * VOCAB - 1), min_size=count, max_size=count, unique=True))
        chosen = sorted(draw(st.sets(st.integers(0, rows - 1), min_size=1)))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        values = torch.randn(count, generator=generator).numpy()
        vector = torch.randn(VOCAB, generator=generator)
        number = draw(NUMBERS)
        operator = draw(st.sampled_from(OPERATORS))
        if kind == 0:
            log.put(draw(st.lists(st.integers(0, rows * VOCAB - 1), max_size=6)), number)
        elif kind == 1:
            log.edit_positions(unique, [(operator, draw(st.sampled_from([number, values])))])
        elif kind == 2:
            log.fill(chosen, number)
        elif kind == 3:
            log.save(unique)
            registers.append(count)
        elif kind == 4 and count in registers:
            operand = draw(st.sampled_from([number, values]))
            log.restore(unique, registers.index(count), draw(st.sampled_from([(), [(operator, operand)]])))
        elif kind == 5:
            log.edit_rows(chosen, operator, draw(st.sampled_from([number, vector.numpy()])))
        elif kind == 6:
            log.put_rows(chosen, vector.numpy())
        elif kind == 7:
            log.put_mask(chosen, vector > 0, number)
        elif kind == 8:
            log.put_mask(chosen, torch.randn(len(chosen), VOCAB, generator=generator) > 0, number)
    return log


def one_by_one(edits: Iterable[Edit], logits: torch.Tensor) -> None:
    """Apply each edit by itself, with NumPy."""
    array = logits.numpy()
    flat = array.reshape(-1)
    registers: list[Any] = []

    def calculated(values: Any, operator: str, operand: Any) -> Any:
        other = np.asarray(operand, np.float32)
        function = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operator]
        return function(values, other)

    for edit in edits:
        name = type(edit).__name__
        fields: Any = edit
        if name == "Put":
            flat[fields.positions] = fields.value
        elif name == "Fill":
            array[fields.rows] = fields.value
        elif name == "Save":
            registers.append(flat[fields.positions].copy())
        elif name == "Restore":
            values = registers[fields.register]
            for operator, operand in fields.arithmetic:
                values = calculated(values, operator, operand)
            flat[fields.positions] = values
        elif name == "EditPositions":
            values = flat[fields.positions]
            for operator, operand in fields.arithmetic:
                values = calculated(values, operator, operand)
            flat[fields.positions] = values
        elif name == "EditRows":
            array[fields.rows] = calculated(array[fields.rows], fields.operator, fields.operand)
        elif name == "PutRows":
            array[fields.rows] = fields.values
        else:
            mask = np.unpackbits(fields.bits, axis=1, count=VOCAB).astype(bool)
            array[fields.rows] = np.where(mask, np.float32(fields.value), array[fields.rows])


def same_but_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit; NaNs are equal, since the sign of a computed one is not defined."""
    return bits(one.nan_to_num(nan=12345.0)) == bits(other.nan_to_num(nan=12345.0)) and torch.equal(
        one.isnan(), other.isnan()
    )
