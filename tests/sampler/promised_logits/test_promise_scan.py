"""Tests of the classes that are called with real logits from the beginning."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.promised_logits.promise_scan import reason_against_promises

HEAD = """
import re
import sys
import torch
from torch import Tensor
from logitship import CustomLogitProcessor

class Base(CustomLogitProcessor):
    def __init__(self):
        super().__init__()

def calls_itself(node):
    return node and calls_itself(node[0])

def calls_the_other(node):
    return node and calls_this(node[0])

def calls_this(node):
    return node and calls_the_other(node[0])

def compares_types(value):
    return compares_types(value) if value is None else type(value) is torch.Tensor

class Scanned(Base):
    pattern = re.compile("a")

    def __init__(self):
        super().__init__()
        self.other = re.compile("b")

    def __call__(self, logits, custom_param_list=None):
        BODY
        return logits
"""


def reason(body: str) -> str:
    """Return the reason for a class with these statements."""
    return reason_against_promises(load_class(SourceProcessor(HEAD.replace("BODY", body), "Scanned")))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert type(logits) is torch.Tensor", "it compares the type of an object"),
        ("assert torch.Tensor is type(logits)", "it compares the type of an object"),
        ("assert type(logits) == Tensor", "it compares the type of an object"),
        ("assert type(logits) in (torch.Tensor,)", "it compares the type of an object"),
        ("kind = type(logits); assert kind is torch.Tensor", "it compares the type of an object"),
        ("assert logits.__class__ is torch.Tensor", "it compares the type of an object"),
        ("[row for row in logits if type(row) is not Tensor]", "it compares the type of an object"),
        ("logits = torch.compile(len)(logits)", "it uses torch.compile"),
        ("logits = torch.jit.trace(len, logits)", "it uses torch.jit"),
        ("with torch.inference_mode(): logits += 1", "it uses torch.inference_mode"),
        (
            "from torch._subclasses.fake_tensor import FakeTensorMode as Fake\n        with Fake(): logits.sum()",
            "it uses torch's dispatch modes",
        ),
        ("torch.ones(3).data = logits", "it replaces the data of a tensor"),
        ("logits.__class__ = Tensor", "it replaces the class of an object"),
        ("sys.settrace(None)", "it traces its execution"),
        ("with torch._C.DisableTorchFunctionSubclass(): logits += 1", "it switches off tensor classes"),
        ("compares_types(logits)", "it compares the type of an object"),
    ],
)
def test_dense(body: str, expected: str) -> None:
    assert reason(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        "assert isinstance(logits, torch.Tensor)",
        "assert logits is not None and type(self).__name__",
        "name = type(logits).__name__; assert custom_param_list is None",
        "re.compile('x').match('y')",
        "logits = logits.type(torch.float32) if logits is not None else None",
        "name = logits.__class__.__name__; assert custom_param_list is None",
        "logits.data[0] = 1",
        "compile = 1; self.export = compile",
        "calls_itself([[]]); calls_this([[]])",
        "inner = lambda node: node and inner(node[0]); inner([[]])",
    ],
)
def test_not_dense(body: str) -> None:
    assert reason(body) == ""


def test_helpers_are_scanned() -> None:
    class Calling(CustomLogitProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            return helper(logits)

    assert reason_against_promises(Calling) == "it compares the type of an object"


def helper(logits: torch.Tensor) -> torch.Tensor:
    assert type(logits) is torch.Tensor
    assert re.compile("a")
    return logits
