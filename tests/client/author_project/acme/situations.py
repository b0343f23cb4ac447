"""Processors in a module whose annotations are evaluated."""

import functools
import logging
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Optional

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from logitship import CustomLogitProcessor

from .bases import Adding

log = logging.getLogger(__name__)
INTERVAL = re.compile(r"(\d+)-(\d+)")
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")))


class Mode(StrEnum):
    ADD = "add"
    SCALE = "scale"


@dataclass
class Config:
    mode: Mode = Mode.ADD
    intervals: list[str] = field(default_factory=lambda: ["1-2"])
    fallback: Optional["Config"] = None


@dataclass(frozen=True, slots=True)
class Interval:
    low: int
    high: int


CONFIG = Config(intervals=["3-4", "5-6"], fallback=Config(Mode.SCALE))


@functools.lru_cache(maxsize=16)
def parsed(text: str) -> Interval:
    log.debug("parsing %s", text)
    match = INTERVAL.fullmatch(text)
    assert match is not None
    return Interval(*map(int, match.groups()))


def width(interval: Interval) -> int:
    return interval.high - interval.low


class Annotated(CustomLogitProcessor):
    """Its annotations and defaults use the author's types."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None, config: Config = CONFIG
    ) -> torch.Tensor:
        assert config.mode is Mode.ADD
        assert config.fallback is not None
        return logits + sum(width(parsed(text)) for text in config.intervals + config.fallback.intervals)


class SharingHelpers(CustomLogitProcessor):
    """Uses the helpers of the class above."""

    __slots__ = ("interval",)

    def __init__(self) -> None:
        self.interval = Interval(2, 9)

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        return F.one_hot(torch.tensor([0, 1]), logits.shape[-1]) * width(self.interval) + F.softmax(logits, dim=-1)


class ClassTensors(Adding, unit="logit"):
    """Tensors of all kinds as class attributes."""

    bias = torch.arange(4.0)
    learned = torch.nn.Parameter(torch.ones(4))
    differentiable = torch.ones(4, requires_grad=True)
    sparse = torch.eye(4).to_sparse()
    empty = torch.empty(0, 4)

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        assert self.learned.requires_grad
        assert self.differentiable.requires_grad
        assert self.empty.shape == (0, 4)
        return (logits + self.bias + self.learned + self.differentiable + self.sparse.to_dense()[2]).detach()


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU())
        self.register_buffer("offset", torch.ones(4))
        torch.nn.init.ones_(self.layers[0].weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden) + self.offset


class Network(CustomLogitProcessor):
    """Uses a torch module of the author with weights."""

    head = Head()

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        return self.head(logits + 1)


TRAINED = Head()
torch.nn.init.constant_(TRAINED.layers[0].weight, 0.5)


class Trained(CustomLogitProcessor):
    """Uses a torch module whose weights changed after the statement that created it."""

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        return TRAINED(logits + 1)


class SetLater(Adding, unit="logit"):
    """Has an attribute that changes after the class is created."""

    weight = 1.0

    def amount(self) -> float:
        return self.weight


SetLater.weight = 2.0


class UsesTokenizer(Adding, unit="logit"):
    """Uses a tokenizer, which is data and can be pickled."""

    def amount(self) -> float:
        return len(TOKENIZER) + TOKENIZER.convert_tokens_to_ids("b")
