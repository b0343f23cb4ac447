from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from logitship.sampler.edits.edit_codec import NUM_SLOTS, InvalidEdits, VectorSender, VectorStore, decode, encode
from logitship.sampler.edits.edit_operations import MAX_EDITS, MAX_EDITS_PER_ROW, PutMask
from logitship.sampler.edits.logit_edits import EditLog, RecentVectors
from logitship.sampler.edits.merged_edits import apply_edits
from tests.helpers.random_cases import examples
from tests.sampler.promised_logits.promised import bits

from .random_edits import VOCAB, logs, one_by_one, same_but_nan


def test_vectors_are_sent_once() -> None:
    recent, sender, store = RecentVectors(), VectorSender(), VectorStore(VOCAB)
    vectors = [torch.randn(VOCAB) for _ in range(2 * NUM_SLOTS)]
    sizes = []
    generator = torch.Generator().manual_seed(0)
    for number in torch.randint(len(vectors), (200,), generator=generator).tolist():
        log = EditLog(1, VOCAB, recent)
        log.edit_rows([0], "+", vectors[number].numpy())
        data = encode(log, sender)
        sizes.append(len(data))
        logits = torch.zeros(1, VOCAB)
        apply_edits(logits, [(range(1), decode(data, 1, VOCAB, store))])
        assert torch.equal(logits[0], vectors[number])
    assert len(set(sizes)) == 2
    assert sizes.count(min(sizes)) > 60


def test_vector_with_other_bits_is_another_vector() -> None:
    sender, store = VectorSender(), VectorStore(VOCAB)
    for zero in (0.0, -0.0):
        log = EditLog(1, VOCAB)
        log.put_rows([0], np.full(VOCAB, zero, np.float32))
        logits = torch.ones(1, VOCAB)
        apply_edits(logits, [(range(1), decode(encode(log, sender), 1, VOCAB, store))])
        assert bits(logits) == bits(torch.full((1, VOCAB), zero))


def test_recent_vectors_notice_changes() -> None:
    """The owner of a vector changes it between calls, or in the middle of one."""
    recent, sender, store = RecentVectors(), VectorSender(), VectorStore(VOCAB)
    vector = torch.randn(VOCAB)
    expected, sizes = torch.zeros(1, VOCAB), []
    logits = torch.zeros(1, VOCAB)
    for call in range(6):
        log = EditLog(1, VOCAB, recent)
        for token in range(2):
            log.edit_rows([0], "+", vector.numpy())
            expected += vector
            if call == 1:
                vector[token] += 1.0
        data = encode(log, sender)
        sizes.append(len(data))
        apply_edits(logits, [(range(1), decode(data, 1, VOCAB, store))])
        assert bits(logits) == bits(expected)
    assert sizes[3] == sizes[4] == sizes[5] < min(sizes[:3])


def test_recent_vectors_are_copied_once() -> None:
    recent = RecentVectors()
    vector = torch.randn(VOCAB).numpy()
    copy = recent.copy_of(vector)
    assert copy is not vector
    assert recent.copy_of(vector.copy()) is copy


@examples(500)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    check_hostile(data)


@pytest.mark.slow
@examples(500)
@given(logs(3), st.data())
def test_changed_bytes(log: EditLog, data: st.DataObject) -> None:
    encoded = bytearray(encode(log, VectorSender()))
    for _ in range(data.draw(st.integers(1, 4))):
        if encoded:
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    check_hostile(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def check_hostile(data: bytes) -> None:
    """Decode bytes of a sandbox for rows 1 to 3 of 5, and look at the others."""
    logits = torch.randn(5, VOCAB)
    before = logits.clone()
    try:
        edits = decode(data, 3, VOCAB, VectorStore(VOCAB))
    except InvalidEdits:
        return
    apply_edits(logits, [(range(1, 4), edits)])
    assert bits(logits[0]) == bits(before[0])
    assert bits(logits[4]) == bits(before[4])


def header(kind: int, detail: int = 0, number: int = 0, count: int = 1, value: float = 0.0) -> bytes:
    return struct.pack("<BBHIf", kind, detail, number, count, value)


PUT, FILL, SAVE, RESTORE, EDIT_ROWS, PUT_ROWS, PUT_MASK, EDIT_POSITIONS = range(8)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(8), "no such edit"),
        (header(PUT, count=0), "no such edit"),
        (header(PUT)[:-1], "too short"),
        (header(PUT), "too short"),
        (header(PUT, count=1 << 31), "too short"),
        (header(PUT) + numbers(2 * VOCAB), "outside the rows"),
        (header(PUT) + numbers(2**32 - 1), "outside the rows"),
        (header(PUT, count=2) + numbers(2, 1), "does not ascend"),
        (header(PUT, count=70) + numbers(*[0] * 68, 1, 0), "does not ascend"),
        (header(PUT, count=85) + numbers(*[0] * 85), "too many elements"),
        (header(FILL) + numbers(2), "a row"),
        (header(FILL, count=2) + numbers(1, 1), "does not ascend"),
        (header(FILL, count=2) + numbers(1, 0), "does not ascend"),
        (header(SAVE, count=2) + numbers(1, 0), "does not ascend"),
        (header(SAVE, count=2) + numbers(1, 1) + header(RESTORE, count=2) + numbers(1, 1), "occurs twice"),
        (header(SAVE, number=1) + numbers(1), "not the next register"),
        (header(RESTORE) + numbers(1), "no such register"),
        (header(SAVE) + numbers(1) + header(RESTORE, count=2) + numbers(1, 2), "no such register"),
        (header(SAVE) + numbers(1) + header(RESTORE, 1) + numbers(1) + struct.pack("<BBHf", 9, 0, 0, 0), "operator"),
        (header(EDIT_POSITIONS) + numbers(2 * VOCAB), "outside the rows"),
        (header(EDIT_POSITIONS, 1, count=2) + numbers(1, 1) + bytes(8), "does not ascend"),
        (header(EDIT_POSITIONS, 1) + numbers(1), "too short"),
        (header(EDIT_POSITIONS, 1) + numbers(1) + struct.pack("<BBHf", 9, 0, 0, 0), "operator"),
        (header(EDIT_POSITIONS, 255) + numbers(1) + bytes(8 * 255), "too many edits"),
        (header(EDIT_ROWS, 4) + numbers(0), "operator"),
        (header(EDIT_ROWS, 0, 1) + numbers(0) + struct.pack("<HH", 0, 0), "empty slot"),
        (header(PUT_ROWS, 0, 1) + numbers(0) + struct.pack("<HH", NUM_SLOTS, 1) + bytes(4 * VOCAB), "no such slot"),
        (header(PUT_MASK) + numbers(0), "too short"),
        ((header(PUT) + numbers(1)) * (MAX_EDITS + MAX_EDITS_PER_ROW * 2 + 1), "too many edits"),
        ((header(FILL, count=2) + numbers(0, 1)) * 9, "too many elements"),
        (header(SAVE) + numbers(1) + header(RESTORE, 255) + numbers(1) + bytes(8 * 255), "too many edits"),
        (
            header(SAVE, count=40)
            + numbers(*range(40))
            + header(RESTORE, 8, 0, 40)
            + numbers(*range(40))
            + bytes(8 * 8),
            "too many elements",
        ),
    ],
)
def test_invalid(data: bytes, message: str) -> None:
    with pytest.raises(InvalidEdits, match=message):
        decode(data, 2, VOCAB, VectorStore(VOCAB))


def test_log_is_full_before_the_server_refuses_it() -> None:
    def fill(log: EditLog, number: int) -> None:
        log.fill([0], float(number))

    def multiply(log: EditLog, number: int) -> None:
        log.restore([1], register, [("*", 2.0), ("+", float(number))])

    for edit in (fill, multiply):
        log = EditLog(3, 40 * VOCAB)
        register = log.save([1])
        number = 0
        while not log.is_full:
            last = log.copy()
            edit(log, number)
            number += 1
        decode(encode(last, VectorSender()), 3, 40 * VOCAB, VectorStore(40 * VOCAB))
        assert number > 20


@examples(300)
@given(logs(3), st.integers(0, 9))
def test_sent_edits_have_the_same_effect(log: EditLog, seed: int) -> None:
    """In whatever order an author names positions and rows: they are sent in ascending order."""
    assume(not log.is_full)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    with np.errstate(all="ignore"):
        one_by_one(log.copy().edits, expected)
    apply_edits(logits, [(range(3), decode(encode(log, VectorSender()), 3, VOCAB, VectorStore(VOCAB)))])
    assert same_but_nan(logits, expected)


@pytest.mark.parametrize("count", [3, 40, 100])
def test_values_follow_positions_that_are_sorted(count: int) -> None:
    """Also those of a register that is saved in one order and restored in others."""
    vocab_size = 1000
    generator = torch.Generator().manual_seed(count)
    positions, other = (torch.randperm(2 * vocab_size, generator=generator)[:count].tolist() for _ in range(2))
    log = EditLog(2, vocab_size)
    log.put(positions, 3.0)
    register = log.save(positions)
    log.edit_positions(positions, [("*", torch.arange(float(count)).numpy())])
    log.restore(other, register, [("+", torch.arange(float(count)).numpy())])
    log.fill([1], -1.0)
    log.restore(positions, register)
    logits = torch.randn(2, vocab_size, generator=generator)
    expected = logits.clone()
    one_by_one(log.edits, expected)
    apply_edits(logits, [(range(2), decode(encode(log, VectorSender()), 2, vocab_size, VectorStore(vocab_size)))])
    assert torch.equal(logits, expected)


def test_number_at_most_positions_is_sent_as_a_mask() -> None:
    log = EditLog(4, VOCAB)
    forbidden = [row * VOCAB + token for row in (2, 0) for token in range(VOCAB - 1, 0, -1)]
    log.put(forbidden, -np.inf)
    data = encode(log, VectorSender())
    (edit,) = decode(data, 4, VOCAB, VectorStore(VOCAB))
    assert isinstance(edit, PutMask)
    logits = torch.ones(4, VOCAB)
    apply_edits(logits, [(range(4), [edit])])
    assert logits.isneginf().view(-1).nonzero()[:, 0].tolist() == sorted(forbidden)


def test_positions_in_random_order_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """To sort millions of them would take the server longer than to apply the edit."""
    rows, vocab_size = 4, 1000
    generator = np.random.default_rng(0)
    positions = generator.permutation(rows * vocab_size).astype("<u4")
    data = header(SAVE, count=len(positions)) + np.sort(positions).tobytes()
    data += header(RESTORE, count=len(positions)) + positions.tobytes()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("positions are sorted")

    for name in ("argsort", "lexsort", "sort", "unique"):
        monkeypatch.setattr(np, name, fail)
    decode(bytearray(data), rows, vocab_size, VectorStore(vocab_size))
