"""Statements as authors may write them, on promised and on real logits; `;` separates those of a program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .promised import assert_same, eager, example_logits, promised

ROWS, VOCAB = 3, 40
PROGRAMS = Path(__file__).with_name("promised_statements.txt").read_text().splitlines()


def names() -> dict[str, Any]:
    """Return the names that statements use; new objects, as statements may edit them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([1, 5, 9])
    return {
        "torch": torch,
        "np": np,
        "inf": float("inf"),
        "ids": [1, 5, 9],
        "t": ids,
        "index": ids.repeat(ROWS, 1),
        "mask": torch.arange(VOCAB) % 2 == 0,
        "masks": torch.rand(ROWS, VOCAB, generator=generator) < 0.3,
        "vec": torch.randn(VOCAB, generator=generator),
        "src": torch.randn(ROWS, 3, generator=generator),
        "V": VOCAB,
        "R": ROWS,
    }


def function(program: str) -> Any:
    """Return a function with these statements, which returns `l`."""
    known = names()
    exec("def f(l):\n    " + "\n    ".join(program.split("; ")) + "\n    return l", known)
    return known["f"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_statement(program: str) -> None:
    logits = example_logits(ROWS, VOCAB)
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():  # some are given once per process, so in only one of two calls
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            expected = eager(function(program), logits)
            torch.set_default_dtype(dtype)
            torch.manual_seed(0)
            found = promised(function(program), logits)
            torch.set_default_dtype(dtype)
            assert_same(found, expected)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
