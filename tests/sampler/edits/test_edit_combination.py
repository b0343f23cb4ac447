from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.edits.edit_codec import VectorSender, VectorStore, decode, encode
from logitship.sampler.edits.edit_combination import combine_edits
from logitship.sampler.edits.edit_operations import Put
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.edits.merged_edits import edit_layers
from tests.helpers.random_cases import examples
from tests.sampler.promised_logits.promised import bits

from .random_edits import VOCAB, logs, logs_by_row, one_by_one, same_but_nan


@pytest.mark.slow
@examples(600)
@given(st.integers(1, 5).flatmap(lambda rows: st.one_of(logs(rows), logs_by_row(rows))))
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_combined_edits_have_the_same_effect(log: EditLog) -> None:
    logits = torch.randn(log.num_rows, VOCAB)
    expected = logits.clone()
    one_by_one(log.edits, expected)
    combined = combine_edits(log.edits, log.num_rows, VOCAB)
    assert len(combined) <= len(log.edits)
    one_by_one(combined, logits)
    assert same_but_nan(logits, expected)


def sent(log: EditLog) -> list[str]:
    """Return the kinds of the edits that are sent for a log, and compare their effect with the log's."""
    edits = decode(encode(log, VectorSender()), log.num_rows, VOCAB, VectorStore(VOCAB))
    logits = torch.randn(log.num_rows, VOCAB)
    expected = logits.clone()
    one_by_one(log.edits, expected)
    one_by_one(edits, logits)
    assert bits(logits) == bits(expected)
    return [type(edit).__name__ for edit in edits]


def test_kept_tokens_of_many_rows() -> None:
    log = EditLog(8, VOCAB)
    for row in range(8):
        register = log.save([row * VOCAB + 1, row * VOCAB + 2 + row % 3])
        log.fill([row], -math.inf)
        log.restore([row * VOCAB + 1, row * VOCAB + 2 + row % 3], register)
    assert len(log.edits) == 24
    assert len(edit_layers([(range(8), log.edits)], VOCAB)) == 3
    assert sent(log) == ["Save", "Fill", "Restore"]


def test_registers_restored_in_another_order() -> None:
    log = EditLog(4, VOCAB)
    registers = [log.save([row * VOCAB + 1, row * VOCAB + 2]) for row in range(4)]
    log.fill(range(4), -math.inf)
    for row in (2, 0, 3, 1):
        log.restore([row * VOCAB + 1, row * VOCAB + 2], registers[row], [("+", np.array([row, 0.5], np.float32))])
    assert sent(log) == ["Save", "Fill", "Restore"]


def test_register_that_is_restored_twice() -> None:
    log = EditLog(4, VOCAB)
    registers = [log.save([row * VOCAB + 1]) for row in range(3)]
    log.restore([3 * VOCAB + 5], registers[0])
    for row in range(3):
        log.restore([row * VOCAB + 2], registers[row])
    assert sent(log) == ["Save", "Save", "Restore", "Restore", "Restore"]


def test_unused_registers_are_not_sent() -> None:
    log = EditLog(4, VOCAB)
    for row in range(4):
        log.save([row * VOCAB])
    register = log.save([5])
    log.fill([1], 0.0)
    log.restore([6], register)
    assert sorted(sent(log)) == ["Fill", "Restore", "Save"]


def test_arithmetic_in_place_is_one_edit() -> None:
    log = EditLog(2, VOCAB)
    log.restore([3, 5], log.save([3, 5]), [("*", 2.0), ("+", np.array([1.0, -1.0], np.float32))])
    assert sent(log) == ["EditPositions"]
    log.restore([VOCAB], log.save([VOCAB]), [("-", 1.5)])
    log.fill([0], 0.0)
    assert sent(log) == ["EditPositions", "EditPositions", "Fill"]


def test_arithmetic_of_each_row_is_one_edit() -> None:
    log = EditLog(8, VOCAB)
    for row in range(8):
        log.restore([row * VOCAB + row], log.save([row * VOCAB + row]), [("+", 2.0)])
    assert sent(log) == ["EditPositions"]


def test_arithmetic_that_is_not_in_place_keeps_its_register() -> None:
    log = EditLog(1, VOCAB)
    log.restore([5, 3], log.save([3, 5]), [("+", 1.0)])
    assert sent(log) == ["Save", "Restore"]
    register = log.save([7])
    for position in (7, 8):
        log.restore([position], register, [("+", 1.0)])
    log.restore([9], log.save([9]), [("-", 1.0)])
    assert sent(log) == ["Save", "Restore", "Save", "Restore", "Restore", "EditPositions"]


def test_puts_one_by_one() -> None:
    log = EditLog(2, VOCAB)
    for position in range(2 * VOCAB):
        log.put([position], -math.inf)
    assert sent(log) == ["PutMask"]


def test_puts_of_a_number_are_one_edit() -> None:
    log = EditLog(2, 3 * 4096)
    for _ in range(5):
        log.put(range(4096), -math.inf)
    log.put([1], 0.0)
    assert [len(edit.positions) for edit in log.edits if isinstance(edit, Put)] == [5 * 4096, 1]


def test_vector_for_each_row() -> None:
    log = EditLog(8, VOCAB)
    vector = torch.randn(VOCAB)
    for row in range(8):
        log.edit_rows([row], "+", vector.numpy())
    assert sent(log) == ["EditRows"]
    vector.zero_()  # the log has its own
    assert sent(log) == ["EditRows"]
    log.edit_rows([0], "+", vector.numpy())
    assert sent(log) == ["EditRows", "EditRows"]


def test_numbers_with_other_bits_stay_apart() -> None:
    log = EditLog(4, VOCAB)
    for row, value in enumerate([0.0, -0.0, math.nan, math.nan]):
        log.fill([row], value)
    assert sent(log) == ["Fill"] * 3
