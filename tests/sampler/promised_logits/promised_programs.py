"""Random programs of tensor operations on logits, as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

NUM_ROWS, VOCAB_SIZE = 3, 8


def names() -> dict[str, Any]:
    """Return the names that programs use; new objects, as programs may edit them."""
    generator = torch.Generator().manual_seed(5)
    vector = torch.randn(VOCAB_SIZE, generator=generator)
    sparse = torch.zeros(NUM_ROWS, VOCAB_SIZE)
    sparse[1, 3], sparse[0, 0] = 2.5, -torch.inf
    return {
        "torch": torch,
        "np": np,
        "inf": float("inf"),
        "R": NUM_ROWS,
        "V": VOCAB_SIZE,
        "vec": vector,
        "zero": torch.tensor([0.0, -0.0] * (VOCAB_SIZE // 2)),
        "mask": vector > 0,
        "masks": torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) > 0.5,
        "dense": torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator),
        "sparse": sparse,
        "column": torch.tensor([[1.5], [-2.0], [0.0]]),
        "one": torch.tensor([0.3]),
        "two": torch.tensor([3.0, -1.0]),
        "pairs": torch.tensor([[3.0, -1.0], [0.5, 1.0], [-0.0, 2.0]]),
        "index": torch.tensor([[0, 3], [2, 1], [7, 5]]),
        "ids": torch.tensor([2, 6]),
    }


def _one_of(usual: list[str], rare: list[str]) -> st.SearchStrategy[str]:
    """Return a strategy for one of the usual texts, and now and then for a rare one, which most likely raises."""
    return st.sampled_from(usual * 12 + rare)


_ROW = _one_of(["0", "1", "-1", "np.int64(1)", "torch.tensor(2)"], ["3", "'a'", "True"])
_ROWS = _one_of(
    [
        ":",
        "1:",
        "::2",
        "...",
        "[0, 2]",
        "[2, 0]",
        "(0, 1)",
        "np.array([0, 2])",
        "torch.tensor([True, False, True])",
        "[1]",
    ],
    ["[]", ":0", "[0, 0]", "None"],
)
_TWO = [
    "[1, 5]",
    "[5, 1]",
    "[-1, 0]",
    "ids",
    "ids.int()",
    "np.array([1, 5])",
    "range(2)",
    "(3, 4)",
    "[ids[0], 4]",
    "3:5",
]
_COLUMNS = _one_of(
    [*_TWO, "mask", "[3, 3]", "4", "-2", ":", "...", "[4]", "[]"],
    ["ids[:0]", "[9, 1]", "[True, False]", "2:2", "ids[None]", "(1,)", "[[1, 2], [3, 4]]", "::-1"],
)
_NUMBER = _one_of(
    ["-inf", "0.0", "-0.0", "2", "-1.5", "0.1", "3.0", "inf", "torch.tensor(0.7)", "1e-42", "np.float64(0.3)"],
    ["1e39", "10**20", "True", "float('nan')"],
)
_WHOLE = _one_of(
    ["vec", "zero", "dense", "sparse", "column", "torch.full((V,), -inf)", "torch.zeros_like(l)", "one"],
    ["vec[None]", "vec.double()", "two", "dense[None]", "one[None]", "one[None, None]", "one.double()"],
)
_FEW = _one_of(["two", "two[:1]", "torch.tensor([2.0])"], ["pairs", "vec", "two[None]"])
_OPERATOR = st.sampled_from("+-*/")
_MASK = _one_of(["mask", "masks", "masks[:1]", "column > 0"], ["mask[None]", "mask[:5]", "dense"])
_SOME_ROWS = st.one_of(_ROW, _ROWS)
_CELLS = st.one_of(
    st.builds("{}, {}".format, _ROW, _COLUMNS),
    st.builds("{}, {}".format, _ROWS, _COLUMNS),
    st.sampled_from(["masks", "[0, 2], [1, 5]", "torch.arange(R)[:, None], index", "masks[:, 0]"]),
)
_PLACE = st.one_of(_SOME_ROWS, _CELLS)
_TENSOR = _one_of(["l", "l", "c"], ["r", "k"])
_INDEX = _one_of(["index"], ["ids", "index[:2]", "index.int()"])
_VALUE = st.one_of(_NUMBER, _WHOLE)

_STATEMENT = st.one_of(
    st.builds("{}[{}] = {}".format, _TENSOR, _PLACE, _NUMBER),
    st.builds("{}[{}] = {}".format, _TENSOR, _CELLS, _FEW),
    st.builds("{}[{}] = {}".format, _TENSOR, _SOME_ROWS, _WHOLE),
    st.builds("{0}[{1}] = {0}[{1}] {2} {3}".format, _TENSOR, _PLACE, _OPERATOR, _NUMBER),
    st.builds("{}[{}] {}= {}".format, _TENSOR, _PLACE, _OPERATOR, _NUMBER),
    st.builds("{}[{}] {}= {}".format, _TENSOR, _CELLS, _OPERATOR, _FEW),
    st.builds("{}[{}] {}= {}".format, _TENSOR, _SOME_ROWS, _OPERATOR, _WHOLE),
    st.builds("{} {}= {}".format, _TENSOR, _OPERATOR, _VALUE),
    st.builds("{0} = {0} {1} {2}".format, _TENSOR, _OPERATOR, _VALUE),
    st.builds("{0} = {2} {1} {0}".format, _TENSOR, _OPERATOR, _VALUE),
    st.builds("l[{0}] = c[{0}]".format, _SOME_ROWS),
    st.builds("k = {}[{}]".format, _TENSOR, _CELLS),
    st.builds("k = {0}[{1}].clone(); {0}[{2}] = {3}; {0}[{1}] = k".format, _TENSOR, _CELLS, _SOME_ROWS, _NUMBER),
    st.builds("k {}= {}".format, _OPERATOR, _NUMBER),
    st.builds("r[{}] = {}".format, _COLUMNS, _NUMBER),
    st.builds("r[{}] {}= {}".format, _COLUMNS, _OPERATOR, _NUMBER),
    st.builds("r = l[{}]".format, _ROW),
    st.builds("for r in {}: r[{}] = {}".format, _TENSOR, _COLUMNS, _NUMBER),
    st.builds("{}.masked_fill_({}, {})".format, _TENSOR, _MASK, _NUMBER),
    st.builds("{0} = {0}.masked_fill({1}, value={2})".format, _TENSOR, _MASK, _NUMBER),
    st.builds("{0} = torch.where({1}, {0}, {2})".format, _TENSOR, _MASK, _NUMBER),
    st.builds("{0} = torch.where({1}, {2}, {0})".format, _TENSOR, _MASK, _VALUE),
    st.builds("{}.fill_({})".format, _TENSOR, _NUMBER),
    st.builds("{}.copy_({})".format, _TENSOR, _one_of(["l", "c", "vec", "dense", "sparse"], ["k", "r", "two"])),
    st.builds("{}.scatter_(-1, {}, {})".format, _TENSOR, _INDEX, _one_of(["pairs", "-inf", "2.5"], ["two", "1e39"])),
    st.builds("{}.scatter_add_(-1, {}, {})".format, _TENSOR, _INDEX, _one_of(["pairs"], ["two", "vec"])),
    st.builds("{}.index_fill_({}, ids, {})".format, _TENSOR, _one_of(["-1", "1"], ["0", "2"]), _NUMBER),
    st.builds("{}.index_add_(-1, ids, {})".format, _TENSOR, _one_of(["pairs"], ["two"])),
    st.builds("{}.index_copy_(-1, ids, {})".format, _TENSOR, _one_of(["pairs"], ["two"])),
    st.builds("k = {}.gather(-1, {})".format, _TENSOR, _INDEX),
    st.sampled_from(
        [
            "vec[0] = 9",
            "ids[0] = 1",
            "mask[0] = ~mask[0]",
            "dense[0] = 0",
            "r = l[1]",
            "c = l.clone()",
            "l = l.detach()",
            "c = l",
            "l = c",
            "c = l.view(R, V)",
            "r, _, k = l.unbind()",
            "c = l.contiguous()",
            "k = l.index_select(1, ids)",
        ]
    ),
)
_READ = st.sampled_from(
    [
        "l.sum()",
        "c.sum()",
        "k.sum()",
        "l.softmax(-1)",
        "l[0, 0].item()",
        "l = l.tanh()",
        "r.max()",
        "k.tolist()",
        "l[0].numpy()[0] = 1",
    ]
)


def programs() -> st.SearchStrategy[list[str]]:
    """Return a strategy for statements that edit `l`, a view `r` of it, a copy `c`, and some values `k`.

    Most statements that raise are caught, and the program goes on.
    """
    return st.builds(list.__add__, st.lists(_STATEMENT, min_size=1, max_size=8), st.just([])) | st.lists(
        st.one_of(_STATEMENT, _READ), max_size=8
    )


def function_of(statements: list[str]) -> Any:
    """Return the program as a function of logits. It returns them and what was raised, as text."""

    def program(logits: torch.Tensor) -> torch.Tensor:
        known = {**names(), "l": logits, "r": logits[0], "c": logits.clone(), "k": logits[0, [1, 5]]}
        raised = []
        for statement in statements:
            try:
                exec(statement, known)  # this module's own text
            except Exception as error:  # noqa: BLE001  # compared
                raised.append(f"{statement}: {error!r}")
        program.raised = raised  # type: ignore[attr-defined]
        result: torch.Tensor = known["l"]
        return result

    return program
