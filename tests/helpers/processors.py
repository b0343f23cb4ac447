"""Shipped processors as source text."""

from __future__ import annotations

from textwrap import dedent, indent

from logitship.client.serialization.processor_string import SourceProcessor

HEADER = """
import torch
from logitship import CustomLogitProcessor

class {name}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
"""
EACH_ROW = """
for row, params in zip(logits, custom_param_list):
    req = params["__req__"]
{body}
return logits
"""


def shipped(name: str, body: str) -> SourceProcessor:
    """Return a class whose `__call__(self, logits, custom_param_list)` has this body."""
    return SourceProcessor(HEADER.format(name=name) + indent(dedent(body).strip(), " " * 8) + "\n", name)


def shipped_by_row(name: str, body: str) -> SourceProcessor:
    """Return a class that executes this body for each `row` of logits, with its `params` and their request `req`."""
    return shipped(name, EACH_ROW.format(body=indent(dedent(body).strip(), " " * 4)))


BOOST = shipped_by_row("Boost", 'row[params["token_id"]] += params.get("by", 1000.0)')
