from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.promised_logits.promise import Promise
from logitship.sampler.promised_logits.promised_memory import RecentCalls, Source
from tests.helpers.random_cases import examples

from .promised import assert_same, bits, eager, example_logits, promised

ROWS, VOCAB = 3, 40
INF = float("inf")
IDS = [1, 5, 9]
NAMES: dict[str, Any] = {
    "torch": torch,
    "np": np,
    "copy": copy,
    "inf": INF,
    "ids": IDS,
    "t": torch.tensor(IDS),
    "index": torch.tensor(IDS).repeat(ROWS, 1),
    "mask": torch.arange(VOCAB) % 2 == 0,
    "sparse": torch.arange(VOCAB) == 7,
    "masks": torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) < 0.3,
    "vec": torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)),
    "src": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(3)),
    "V": VOCAB,
    "R": ROWS,
}


def function(code: str) -> Any:
    """Return a function with these statements, which edits and returns `l`."""
    names = dict(NAMES)
    exec("def f(l):\n    " + "\n    ".join(code.split("; ")) + "\n    return l", names)  # this test's code
    return names["f"]


RECORDED = [
    # zeros of both signs
    "b = torch.zeros(V); b[ids] = 2.0; l += b",
    "b = torch.zeros(V); b[[7, 8]] = -0.0; l += b",
    "b = torch.zeros(V); b[[7, 9]] = torch.tensor([-0.0, 1.0]); l[-1] += b",
    "b = torch.zeros(V); b[[6, 8]] = torch.tensor([inf, -2.0]); l -= b",
    "b = torch.full((V,), -0.0); b[[7, 8]] = 0.0; l += b",
    # positions
    "l[0, ids] = -inf",
    "l[2, np.array(ids)] = 2",
    "l[:, ids] = -inf",
    "l[1:, ids] = 0.; l[::2] += 1",
    "l[..., ids] = 2.",
    "l[0, ...] = 2",
    "l[-1, -1] = 4.",
    "l[0, [-1, -2]] = 4.",
    "l[0, [1, 1]] = 3.",
    "l[0, ids] = torch.tensor(-inf)",
    "l[[0, 2], [3, 4]] = 9.",
    "l[torch.tensor([0, 1]), t[:2]] = 7.",
    "l[torch.arange(R)[:, None], t] = -inf",
    "l[0][ids] = -inf",
    "l[0, 3:7] = -inf",
    "l[:, 3:7] = -inf",
    "l[:, 2] = 5",
    "l[[0, 2], 2] = 5",
    "l[:, [1, 2]], l[:, [3, 4]] = 1., 2.",
    "l[0, ids] = -inf; l[0, ids] = 1.; l[0, [1]] += 1",
    # rows
    "l[0] = -inf",
    "l[:] = 0",
    "l[0] = vec",
    "l[:] = vec",
    "l[1:] = vec",
    "l.fill_(2.)",
    "for row in l: row[ids] = -inf",
    "for at, row in enumerate(l): row[ids] -= 1.0 * at",
    "for row in l.unbind(): row[3] = 1.",
    # masks
    "l[0, mask] = -inf",
    "l[0, sparse] = -inf",
    "l[:, mask] = 3.",
    "l[:, sparse] = 3.",
    "l[masks] = -inf",
    "l[0][mask] = -inf",
    "l.masked_fill_(masks, -inf)",
    "l.masked_fill_(mask, -inf)",
    "l = l.masked_fill(mask, -inf)",
    "l = torch.where(mask, -inf, l)",
    "l = torch.where(mask, l, -inf)",
    "l[1] = l[1].masked_fill(mask, -inf)",
    "l[0] = torch.where(mask, l[0], -inf)",
    "l[0] = l[0].masked_fill(mask, -inf) + 1",
    # arithmetic
    "l[:, ids] += 2.5",
    "l[0, ids] += vec[:3]",
    "l[:, ids] += src",
    "l[:, ids] += src[:, :1]",
    "l[0, ids] -= 1",
    "l[0, ids] *= 3",
    "l[0, ids] /= 7",
    "l[0, ids] = l[0, t] / 3 + 1",
    "l[0, ids] = l[1, ids]",
    "l[0, 5] += 1",
    "l[0, 3:7] += 1",
    "l[:, 5] *= 2.",
    "x = l[0]; x += 1",
    "x = l[:, 5]; x -= 2.",
    "x = l[0, ids]; x += 1",
    "l += vec",
    "l *= 0.1",
    "l /= 3",
    "l -= 0.",
    "l[1] /= 0.7",
    "l[2] += vec",
    "l[2] *= vec",
    "l[0].add_(vec); l[0] *= 2",
    "l.sub_(1.5)",
    "l.div_(1.7)",
    "l = l + vec",
    "l = l * 2 - 1",
    "l = torch.add(l, vec)",
    "l = torch.mul(l, 3)",
    "l[0] = l[0] + vec",
    "l[:] = l + 1.5",
    # copies
    "keep = l[0, ids].clone(); l[0] = -inf; l[0, ids] = keep",
    "keep = l[:, ids]; l[:] = -inf; l[:, ids] = keep",
    "keep = l[0, 5].clone(); l[0] = -inf; l[0, 5] = keep",
    "l = l.clone(); l[0] = 1",
    "old = l.clone(); l[0] = 1; l = old",
    # functions
    "l.index_add_(1, t, src)",
    "l[:, t] += 1; l.index_add_(1, t, src); l.index_add_(1, t, src)",
    # nothing of the values
    "pass",
    "l.data[0, ids] = -inf",
    "l.detach()[0, ids] = -inf",
    "assert l.shape == (R, V) and l.size(0) == R and len(l) == R and l.ndim == 2 and l.numel() == R * V",
    "assert l.dtype is torch.float32 and l.device.type == 'cpu' and l.is_contiguous() and not l.requires_grad",
    "assert l[0].shape == (V,) and isinstance(l, torch.Tensor) and torch.is_tensor(l)",
    "z = torch.zeros_like(l); z[0] = 1; l[0] = z[0]",
    "z = torch.full_like(l[0], -inf); z[ids] = 0; l[0] += z",
    "l[0] = l.new_full((V,), 2.)",
    "l[0, ids] = l.new_full((), -inf)",
    "for x in (l, l[0]): z = torch.empty_like(x); assert z.stride() == x.stride() and z.shape == x.shape",
    "z = l[0].new_zeros(2, 3); assert z.is_contiguous() and z.dtype is torch.float32; l[0] += z[0, 0]",
    "keep = l[0, 5].clone(); l[0, 5] = keep + torch.ones_like(keep)",
    "keep = l[0, ids]; l[0, ids] = keep + torch.full_like(keep, 2.)",
    "l.note = 3; l[0, 1] = float(l.note)",
    "with torch.no_grad(): l[0] = 1",
]

RARE = [
    # Could be recorded, but are not.
    "l[1, t] = vec[:3]",
    "l[:, ids] = src",
    "l[[0, 2]] = -inf",
    "l[torch.tensor([True, False, True])] = -inf",
    "l.zero_()",
    "l[0].zero_()",
    "l[0].copy_(vec)",
    "l.select(0, 1)[3] = 1",
    "l.masked_fill_(torch.tensor([[True], [False], [True]]), -inf)",
    "l = l.where(mask, torch.tensor(-inf))",
    "l[0, ids] = 1 - l[0, ids]",
    "l = vec + l",
    "l = vec - l",
    "l = 1 - l",
    "l.scatter_(1, index, -inf)",
    "l.scatter_(-1, index, src)",
    "l[0].scatter_(0, t, -inf)",
    "l = l.scatter(1, index, -inf)",
    "l.scatter_add_(1, index, src)",
    "l.index_fill_(1, t, -inf)",
    "l.index_fill_(0, torch.tensor([0, 2]), -inf)",
    "l.index_copy_(1, t, src)",
    "l.index_select(1, t); l[:, ids] = l.index_select(1, t) + 1",
    "l.index_put_((torch.tensor([0]), torch.tensor([4])), torch.tensor(3.))",
    "l = l.contiguous().float().to(torch.float32)",
    "l = l.view(R, V).reshape(-1, V)",
    "l[0, ids] = l.new_tensor([4.])",
    "l.scatter_(1, index, value=-1.0); l.scatter_(1, index, src=src)",
    "torch.manual_seed(3); l[0] += torch.randn_like(l[0])",
    "s = l.gather(1, index); l.fill_(-inf); l.scatter_(1, index, s) if False else None",
]

READ = [
    "l.softmax(-1)",
    "l = l.log_softmax(-1)",
    "a = l.argmax(-1); l[0, a[0]] = -inf",
    "l[0, ids] = -inf; l = l.log_softmax(-1); l[0] = 1",
    "v, i = l.topk(2); l.fill_(-inf); l.scatter_(1, i, v)",
    "if (l > 0).any(): l[0] = 1",
    "l[l < 0] = -inf",
    "l[0, ids] = l[0].max()",
    "l.clamp_(min=0)",
    "l = torch.maximum(l, vec)",
    "l = torch.stack([l[0], l[1], l[2]])",
    "l = torch.cat([l[:1], l[1:]])",
    "l[0, [1, 1]] += 3.",
    "l[0, ids] = float('nan')",
    "l[0, range(3)] = 1.",
    "l[0, None] = 1",
    "l[0, True] = 1",
    "l[0, torch.tensor(5)] = -inf",
    "l.add_(1, alpha=2)",
    "l.view(-1)[3] = 1",
    "l[0][1:][3] = 2.",
    "l[1] = l[0]",
    "l.numpy()[0] = 1",
    "np.asarray(l)[0] = 1",
    "l = torch.tensor(l.tolist())",
    "l = copy.deepcopy(l)",
    "l = l.to(torch.float64)",
    "l = l.half().float()",
    "l.requires_grad_(); l = l * 2",
    "l = l.exp()",
    "l.log_softmax(-1, dtype=torch.float64)",
    "torch.add(l, 1, out=l)",
    "l.data_ptr()",
    "float(l[0, 0])",
    "repr(l)",
    "l.untyped_storage().size()",
    "l.view(torch.int32)[0] = 0",
    "l = l.T.contiguous().T",
    "l = l.roll(1, -1)",
    "l = torch.tensor(l)",
    "i = torch.tensor(5); v = l[0, i]; i += 1; l[0, 0] = v.item()",
    "i = torch.tensor(9); v = l[:, i]; i += 1; l[0, 0] = v.max()",
    "v = l[0, 5]; l.unsqueeze_(0); x = v.item(); l.squeeze_(0); l[0, 0] = x",
    "v = l[0, 5]; l.t_(); x = v.item(); l.t_(); l[0, 0] = x",
    "r = l[0]; v = r[5:7]; r.unsqueeze_(0); l[0, 0] = v.sum().item()",
    "x = torch.ones(V); x += l[0]; l[1] = x",
    "l = l[0]",
    "l = l.tolist()",
    "l = l[:2]",
]

RAISING = [
    "l[0, 50] = 1.",
    "l[5] = 1",
    "l[0, ids] = vec",
    "l[0, ids] = 1e39",
    "l[0, ids] = 10 ** 30",
    "l[0] = [1.0] * V",
    "l[0, 1] = 2.; l[0, [1, 77]] = 1.",
    "l[0, 'a'] = 1",
    "l[:, ids] += vec",
    "l.masked_fill_(mask[:5], -inf)",
    "l.scatter_(1, index + 100, -inf)",
    "del l[0]",
    "l.no_such_attribute",
    "l += torch.ones(3)",
    "len(l[0, 0])",
    "l[0, ids] = torch.ones(3, dtype=torch.float64)",
    "l.fill_(vec)",
    "l.scatter_(1, index, src=-1.0)",
    "i = torch.tensor([-1, 2, 3]); l[:, i] += 1; l.index_add_(1, i, src)",
    "i = torch.tensor([-1, 2, 3]); l[:, i] = 0; l.index_copy_(1, i, src)",
    "i = torch.tensor([-1, 2, 3]); l[:, i] = l.index_select(1, i)",
    "l.index_fill_(1, torch.tensor([-1, 2]), 0.)",
    "l[0, 5][:] = 3.",
    "l[0:0].view(0, -1)",
]


@pytest.mark.parametrize("code", RECORDED)
def test_recorded_without_a_read(code: str) -> None:
    found = promised(function(code), example_logits())
    assert_same(found, eager(function(code), example_logits()))
    assert not found.was_read


@pytest.mark.parametrize("code", RARE)
def test_rare_operations_read(code: str) -> None:
    found = promised(function(code), example_logits())
    assert_same(found, eager(function(code), example_logits()))
    assert found.was_read


@pytest.mark.parametrize("code", [*READ, *RAISING])
def test_read_where_values_are_needed(code: str) -> None:
    assert_same(promised(function(code), example_logits()), eager(function(code), example_logits()))


@pytest.mark.parametrize("code", [*RECORDED, *RARE, *READ])
def test_after_a_read_everything_is_real(code: str) -> None:
    found = promised(function(code), example_logits(), read_first=True)
    assert_same(found, eager(function(code), example_logits()))


@pytest.mark.parametrize("code", [*RECORDED, *RARE])
def test_one_row(code: str) -> None:
    """Most of these raise with fewer rows: at the same place, and with the same text."""
    logits = example_logits(rows=1)
    assert_same(promised(function(code), logits), eager(function(code), logits))


def test_empty_values_have_the_type_of_logits() -> None:
    """Not the default of the author's code."""

    def program(logits: torch.Tensor) -> torch.Tensor:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            logits[0, 0] = logits[0, torch.tensor([], dtype=torch.int64)].sum().dtype.itemsize
        finally:
            torch.set_default_dtype(default)
        return logits

    assert_same(promised(program, example_logits()), eager(program, example_logits()))


STATEMENTS = [*RECORDED, *RARE, *READ[:-3], "old = l[0]; l = l + 0.5; l[1] = 2.", "l[0] = -inf; l[0, 3] = 0."]


@pytest.mark.filterwarnings("ignore")  # PyTorch warns once, so in only one of two calls
@examples(300)
@given(st.lists(st.sampled_from(STATEMENTS), min_size=2, max_size=6), st.integers(0, 1000))
def test_random_programs(statements: list[str], seed: int) -> None:
    program = function("; ".join(statements))
    logits = example_logits(seed=seed)
    assert_same(promised(program, logits), eager(program, logits))


@pytest.mark.parametrize("vocab_size", [2000, 100_000])
@pytest.mark.parametrize("second", ["ids[0]", "ids[-1]", "(ids[0] + 1) % logits.shape[1]"])
def test_many_ids_in_any_order(second: str, vocab_size: int) -> None:
    """A position may occur twice among more ids than are compared one by one."""
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[:1000]
    logits = example_logits(2, vocab_size)
    ids[1] = eval(second)

    def program(logits: torch.Tensor) -> torch.Tensor:
        logits[1, ids] += 2.0
        logits[0, ids] = logits[0, ids] / 0.7 + torch.arange(1000.0)
        return logits

    assert_same(promised(program, logits), eager(program, logits))


def test_what_an_author_changes_later_changes_no_edit() -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        ids, values, mask, vector = [1, 2], torch.ones(2), torch.ones(VOCAB, dtype=torch.bool), torch.ones(VOCAB)
        tensor = torch.tensor([3, 4])
        logits[0, ids] = 2.0
        logits[0, 7:9] += values
        logits[1, tensor] = 3.0
        logits[2, mask] = 5.0
        logits[1] += vector
        kept = logits[0, tensor]
        kept += values
        ids[0], values[0], mask[0], vector[0], tensor[0] = 9, 9.0, False, 9.0, 9
        logits[0, [3, 4]] = kept
        return logits

    found = promised(program, example_logits())
    assert_same(found, eager(program, example_logits()))
    assert not found.was_read


def test_views_after_a_read_are_views() -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        row, cell, copied = logits[0], logits[1, 2], logits[2, [1, 2]]
        rows = list(logits)
        logits.sum()
        row[1] = 5.0
        cell += 1.0
        copied += 1.0
        rows[2][3] = 7.0
        assert row is not rows[0]
        assert logits[0, 1] == 5.0
        assert float(copied[0]) == float(logits[2, 1]) + 1.0
        return logits

    assert_same(promised(program, example_logits()), eager(program, example_logits()))


def test_returned_object_is_the_given_one() -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        assert logits.add_(1.0) is logits
        assert logits.clamp_(min=0.0) is logits
        assert logits.float() is logits
        return logits

    assert_same(promised(program, example_logits()), eager(program, example_logits()))


def test_pickling_and_threads() -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        logits[0, 1] = 3.0
        copied = pickle.loads(pickle.dumps(logits))
        threads = [threading.Thread(target=logits[row].mul_, args=(2.0,)) for row in range(ROWS)]
        for thread in threads:
            thread.start()
            thread.join()
        return logits + copied

    assert_same(promised(program, example_logits()), eager(program, example_logits()))


def test_autograd() -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        scaled = logits.detach().requires_grad_()
        scaled.square().sum().backward()
        assert scaled.grad is not None
        return logits + scaled.grad

    assert_same(promised(program, example_logits()), eager(program, example_logits()))


class Kept:
    """A promise whose logits the author's code keeps."""

    def __init__(self) -> None:
        self.real = example_logits()
        self.num_fetched = 0
        self.promise = Promise(Source(ROWS, VOCAB, self._fetch))

    def _fetch(self) -> torch.Tensor:
        self.num_fetched += 1
        return self.real


def test_kept_view_gets_the_logits() -> None:
    kept = Kept()
    logits = kept.promise.take()
    view = logits[1]
    logits[1, 2] = 5.0
    given = [logits]
    del logits
    result = kept.promise.conclude(given.pop())
    assert isinstance(result, torch.Tensor)
    assert result.is_set_to(kept.real)
    assert kept.promise.is_kept
    assert kept.num_fetched == 1
    kept.real[1, 3] = 8.0
    assert view[2:4].tolist() == [5.0, 8.0]


def test_nothing_kept_is_an_edit_log() -> None:
    kept = Kept()

    def program(logits: torch.Tensor) -> torch.Tensor:
        row = logits[1]
        row[2] = 5.0
        return logits

    log = kept.promise.conclude(program(kept.promise.take()))
    assert isinstance(log, EditLog)
    assert not kept.promise.is_kept
    assert kept.num_fetched == 0


def test_what_used_values_is_not_kept() -> None:
    kept = Kept()

    def program(logits: torch.Tensor) -> torch.Tensor:
        logits[1, 2] = logits[1].max() + 1
        return logits

    kept.promise.conclude(program(kept.promise.take()))
    assert kept.num_fetched == 1
    assert not kept.promise.is_kept


def test_alias_of_an_earlier_call_raises() -> None:
    kept = Kept()
    alias: Any = kept.promise.take()
    alias.promised_reference = None  # as if nothing referred to it
    kept.promise.conclude(None)
    with pytest.raises(RuntimeError, match="logits of an earlier step"):
        alias.sum()


@pytest.mark.parametrize("ids", [torch.tensor(IDS), list(IDS)], ids=["tensor", "list"])
def test_index_may_change_between_its_uses(ids: Any) -> None:
    """Selections of earlier calls are found by the contents of their indices."""

    def change() -> float:
        ids[0] += 1
        return 2.5

    def program(logits: torch.Tensor) -> torch.Tensor:
        ids[0] = 1
        for row in logits:
            row[ids] -= 1
        logits[:, ids] += change()
        logits[1, ids] = -INF
        return logits

    expected = eager(program, example_logits())
    for _ in range(2):
        assert_same(promised(program, example_logits()), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.numpy().fill(2),  # which does not change its version
        lambda ids: ids.as_strided_((6,), (0,)),
        lambda ids: ids.resize_(3),
        lambda ids: ids.resize_(2, 3),
        lambda ids: ids.unsqueeze_(0),
        lambda ids: ids.set_(torch.arange(10, 16)),
        lambda ids: setattr(ids, "data", torch.arange(20, 26)),
    ],
    ids=["NumPy", "strides", "length", "shape", "dimensions", "storage", "data"],
)
def test_memory_of_index_may_change_between_its_uses(change: Callable[[torch.Tensor], Any]) -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(6)
        for _ in range(2):
            logits[:, ids] = 1.0
        change(ids)
        logits[:, ids] = 2.0
        return logits

    assert_same(promised(program, example_logits()), eager(program, example_logits()))


NUMBERS: list[list[Any]] = [
    [0, 1],
    [1, 0],
    [True, False],
    [False, True],
    [0.0, 1.0],
    [0, 1, 0],
    [],
    [-1, 1],
    [2, VOCAB],
]


@pytest.mark.parametrize(
    "code",
    [
        "l[i] = 1.",
        "l[1][i] += 1; l = l[1][None, i]",
        "l[0, i] += 1",
        "l[1:, i] = 2.",
        "l[-1, i] -= 1",
        "l[1][i] = 3.",
        "l[i, 0] = 4.",
    ],
)
def test_equal_indices_of_other_kinds_select_something_else(code: str) -> None:
    """To Python, True and 1.0 equal 1."""
    kinds = [list, tuple, np.array, torch.tensor, lambda numbers: torch.tensor(numbers, dtype=torch.int32)]
    for kind, numbers in itertools.product(kinds, NUMBERS):
        program = function(code)
        program.__globals__["i"] = kind(numbers)
        assert_same(promised(program, example_logits()), eager(program, example_logits()))


def test_too_many_edits_are_not_recorded() -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        for number in range(200):
            logits[0, number % VOCAB] = float(number)
        return logits

    found = promised(program, example_logits())
    assert_same(found, eager(program, example_logits()))
    assert found.was_read


@pytest.mark.parametrize(("steps", "was_read"), [(255, False), (256, True)])
def test_too_many_steps_for_one_value_are_not_recorded(steps: int, was_read: bool) -> None:
    def program(logits: torch.Tensor) -> torch.Tensor:
        values = logits[:, [5]]
        for _ in range(steps):
            values = values * 0.999
        logits[:, [5]] = values
        return logits

    found = promised(program, example_logits(rows=49))
    assert_same(found, eager(program, example_logits(rows=49)))
    assert found.was_read == was_read


def test_log_of_row_by_row_bans_is_short() -> None:
    promise = Promise(Source(ROWS, VOCAB, lambda: torch.zeros(ROWS, VOCAB)))

    def program(logits: torch.Tensor) -> torch.Tensor:
        for row in range(ROWS):
            logits[row, IDS] = -INF
        return logits

    log = promise.conclude(program(promise.take()))
    assert isinstance(log, EditLog)
    assert len(log.edits) == 1


def test_no_reference_is_left() -> None:
    promise = Promise(Source(ROWS, VOCAB, lambda: torch.zeros(ROWS, VOCAB)))

    def program(logits: torch.Tensor) -> torch.Tensor:
        keep = logits[0, IDS].clone()
        logits[0] = -INF
        logits[0, IDS] = keep
        return logits

    gc.disable()
    try:
        promise.conclude(program(promise.take()))
        memory = weakref.ref(promise._memory)
        del promise
        assert memory() is None
    finally:
        gc.enable()


def test_failed_call_leaves_no_cycle() -> None:
    promise = Promise(Source(ROWS, VOCAB, lambda: torch.zeros(ROWS, VOCAB)))
    memory = weakref.ref(promise._memory)

    def program(logits: torch.Tensor) -> None:
        logits[1][2] = 1.0
        raise LookupError

    with pytest.raises(LookupError):
        program(promise.take())
    gc.disable()
    try:
        promise.end()
        del promise
        assert memory() is None
    finally:
        gc.enable()


def filled(number: int) -> Callable[[], torch.Tensor]:
    """Return a function that fetches logits with this number everywhere."""
    return lambda: torch.full((ROWS, VOCAB), float(number))


def put_one(logits: torch.Tensor) -> torch.Tensor:
    logits[1, 2] = 3.0
    return logits


def add_one(logits: torch.Tensor) -> torch.Tensor:
    return logits + 1.0  # has a memory of its own


def test_kept_logits_are_those_of_their_call() -> None:
    recent = RecentCalls()
    promise = Promise.begin(ROWS, VOCAB, filled(7), recent)
    row = promise.take()[1]
    promise.conclude(None)
    assert promise.is_kept
    other = Promise.begin(ROWS, VOCAB, filled(8), recent)
    assert row.tolist() == [7.0] * VOCAB
    assert other.take()[1].tolist() == [8.0] * VOCAB


def test_logits_of_a_failed_call_are_not_fetched() -> None:
    recent = RecentCalls()
    promise = Promise.begin(ROWS, VOCAB, filled(7), recent)
    logits = promise.take()
    promise.end()
    other = Promise.begin(ROWS, VOCAB, filled(8), recent)
    with pytest.raises(RuntimeError, match="earlier step"):
        logits.sum()
    assert other.take().sum() == 8.0 * ROWS * VOCAB


def test_second_call_reads_its_own_logits() -> None:
    recent = RecentCalls()
    first = Promise.begin(ROWS, VOCAB, filled(7), recent)
    log = first.conclude(put_one(first.take()))
    assert isinstance(log, EditLog)
    second = Promise.begin(ROWS, VOCAB, filled(8), recent)
    expected = torch.full((ROWS, VOCAB), 8.0)
    assert torch.equal(add_one(put_one(second.take())), add_one(put_one(expected)))
    second.end()


def test_attributes_that_are_known_cannot_be_set() -> None:
    logits: Any = Promise.begin(ROWS, VOCAB, filled(0)).take()
    for name in ("shape", "dtype", "device"):
        assert getattr(logits, name) == getattr(torch.zeros(ROWS, VOCAB), name)
        with pytest.raises(AttributeError, match=f"attribute '{name}' .* is not writable"):
            setattr(logits, name, getattr(logits, name))


def test_example_logits_have_what_matters() -> None:
    logits = example_logits()
    assert logits.isneginf().any()
    assert bits(logits[-1, 7]) != bits(logits[-1, 8])
