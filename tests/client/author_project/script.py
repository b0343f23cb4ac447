"""Defines processors in many ways, and prints their strings with their results in this process.

Each adds something to the logits that depends on the feature which its docstring names. The output is JSON:
{name: {"string": ..., "expected": ...}}.
"""

import dataclasses
import enum
import functools
import json
import linecache
import logging
import re
import sys
from abc import abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterator
from math import inf, sqrt
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from acme.processors import Imported, ModuleAttributes, Submodules, TypeCheckingNames
from acme.situations import Annotated, ClassTensors, Network, SetLater, SharingHelpers, Trained, UsesTokenizer
from torch import softmax

from logitship import CustomLogitProcessor

Params = list[dict[str, Any]] | None
T = TypeVar("T")
SCALE = 2.0
WORDS = {"apple", "pear", "plum", "fig"}
FROZEN = frozenset({("a", 1), ("b", 2)})
TABLE = {"a": [1, 2], "b": (3.5, None, True, b"x")}
TENSOR = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
HALF = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
MASK = torch.tensor([True, False])
ARRAY = np.arange(4.0)
PATTERN = re.compile(r"a+b")
LAYER = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.constant_(LAYER.weight, 0.25)
log = logging.getLogger(__name__)
total = 0
double = lambda x: x * 2  # noqa: E731
add_three = functools.partial(lambda a, b: a + b, 3)


class Adding(CustomLogitProcessor):
    """An abstract base class of the author."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Params = None) -> torch.Tensor:
        return logits + float(self.amount())

    @abstractmethod
    def amount(self) -> float: ...


class Constants(Adding):
    """Uses constants of all kinds."""

    def amount(self) -> float:
        sizes = sum(len(word) for word in WORDS if word not in {"plum", "fig"})
        tensors = TENSOR.sum().item() + HALF.sum().item() + MASK.sum().item() + LAYER(TENSOR).sum().item()
        matched = 1 if PATTERN.fullmatch("aab") else 0
        return SCALE + sizes + len(FROZEN) + sum(TABLE["a"]) + TABLE["b"][0] + tensors + ARRAY.sum() + matched


class Imports(Adding):
    """Uses names imported from libraries."""

    def amount(self) -> float:
        log.debug("not shown")
        parts = softmax(TENSOR, -1).sum().item() + np.float32(1) + sqrt(16)
        return parts if parts < inf else 0.0


def even(n: int) -> bool:
    return True if n == 0 else odd(n - 1)


def odd(n: int) -> bool:
    return False if n == 0 else even(n - 1)


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return double(function(*args))

    return wrapper


def politely(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) + 0.5

    return wrapper


@twice
def seven() -> int:
    return 7


@torch.no_grad()
def scaled_sum(values: torch.Tensor, factor: float = SCALE, *, offset: float = sqrt(4)) -> float:
    return float((values * factor).sum()) + offset


class Helpers(Adding):
    """Uses helpers that call each other, decorated, with defaults, lambdas and partials."""

    @politely
    @twice
    def amount(self) -> float:
        return even(10) + odd(7) + fibonacci(10) + seven() + scaled_sum(TENSOR) + double(1) + add_three(4)


class Colour(enum.Enum):
    RED = 1
    GREEN = 2
    CRIMSON = 1  # noqa: PIE796

    def other(self) -> "Colour":
        return Colour.GREEN if self is Colour.RED else Colour.RED

    @property
    def weight(self) -> float:
        return self.value * SCALE


class Level(enum.IntFlag):
    LOW = enum.auto()
    HIGH = enum.auto()


class Planet(enum.Enum):
    EARTH = (1.0, 2.0)

    def __init__(self, mass: float, radius: float) -> None:
        self.mass = mass
        self.radius = radius


class Enums(Adding):
    """Uses enums with methods, aliases and flags."""

    chosen = Colour.RED

    def amount(self) -> float:
        assert Colour.CRIMSON is Colour.RED
        assert self.chosen.other() is Colour.GREEN
        assert Level(3) == Level.LOW | Level.HIGH
        return Colour["GREEN"].weight + Level.HIGH + Planet.EARTH.mass + Planet.EARTH.radius


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    name: str
    kinds: ClassVar[int] = 4

    def __hash__(self) -> int:
        return hash(normalised(self.name))


def normalised(name: str) -> str:
    return name.lower()


@dataclasses.dataclass
class Config:
    size: int = 3
    weights: list[float] = dataclasses.field(default_factory=lambda: [0.5, 1.5])
    start: dataclasses.InitVar[int] = 1

    def __post_init__(self, start: int) -> None:
        self.size += start


CONFIG = Config(5)
BY_KEY = {Key("A"): 10.0, Key("B"): 20.0}


class Dataclasses(Adding):
    """Uses dataclasses as constants and as keys whose hash needs a helper."""

    def amount(self) -> float:
        fresh = dataclasses.replace(Config(), size=1, start=0)
        fields = len(dataclasses.fields(CONFIG)) + len(dataclasses.fields(Key))
        return CONFIG.size + sum(fresh.weights) + BY_KEY[Key("A")] + fields + Key.kinds + (Key("A") < Key("B"))


Point = namedtuple("Point", "x y", defaults=[4])


class Span(NamedTuple):
    start: int
    end: int = 9

    def width(self) -> int:
        return self.end - self.start


class Box(Generic[T]):
    __slots__ = ("__hidden", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.__hidden = 2

    def get(self) -> T:
        return self.value

    def hidden(self) -> int:
        return self.__hidden


class StringBox(Box[str]):
    def get(self) -> str:
        return super().get() + "!"


class Classes(Adding):
    """Uses named tuples, slots, generics, nested classes, descriptors."""

    class Inner:
        factor = 3

        @classmethod
        def make(cls) -> "Classes.Inner":
            return cls()

    step = 2

    @functools.cached_property
    def cached(self) -> int:
        return self.step * 10

    @property
    def level(self) -> int:
        return self.step

    @level.setter
    def level(self, value: int) -> None:
        self.step = value

    @staticmethod
    def offset(value: int) -> int:
        return value + 1

    def amount(self) -> float:
        self.level = 5
        tuples = Point(1).y + Point(1, 2).x + Span(2).width()
        boxes = len(StringBox("abc").get()) + Box(7).get() + Box(1).hidden()
        return tuples + boxes + self.cached + self.offset(1) + self.Inner.make().factor


class Registered(type):
    made: ClassVar[list[str]] = []

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], *, weight: int) -> "Registered":
        cls = super().__new__(mcs, name, bases, body)
        cls.weight = weight
        mcs.made.append(name)
        return cls

    def doubled(cls) -> int:
        return cls.weight * 2


class Weighted(metaclass=Registered, weight=6):
    weight: int


class Metaclasses(Adding):
    """Uses a metaclass of the author, which must not register the class again."""

    def amount(self) -> float:
        return Weighted.doubled() + len(Registered.made)


class Logging:
    """A mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 0.25

    def amount(self) -> float:
        return super().amount() + self.extra


class Base(Adding):
    def amount(self) -> float:
        return 1.0


class Mixins(Logging, Base):
    """Uses cooperative inheritance through `super()`."""


class GlobalStatement(Adding):
    """Writes a global of this class, never of the `__main__` of the loading process."""

    def amount(self) -> float:
        global total
        total += 1
        return total


class Generators(Adding):
    """Uses generators, comprehensions and inner functions that recurse."""

    def values(self) -> Iterator[float]:
        yield from (value * SCALE for value in range(3))

    def amount(self) -> float:
        def depth(tree: list[Any]) -> int:
            return 1 + max((depth(branch) for branch in tree), default=0)

        return sum(self.values()) + depth([[], [[]]]) + sum([x for x in TABLE["a"] if x > 1])


def make_local(factor: float) -> type[CustomLogitProcessor]:
    offsets = [1.0, 2.0]

    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    class LocalBase(Adding):
        def amount(self) -> float:
            return factor

    class Local(LocalBase):
        """Defined in a function, with its variables captured."""

        def amount(self) -> float:
            return super().amount() * sum(offsets) + factorial(4)

    return Local


CELL = '''
import torch
from logitship import CustomLogitProcessor

SHIFT = 2.5

def shifted(x):
    return x + SHIFT

class Notebook(CustomLogitProcessor):
    """Defined in a cell of a notebook."""

    def __call__(self, logits, custom_param_list=None):
        return shifted(logits) + torch.ones(())
'''


def run_cell(text: str, name: str) -> dict[str, Any]:
    """Run a cell like IPython: its text is in `linecache`, its names are in a module without a file."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    variables: dict[str, Any] = {"__name__": "__notebook__"}
    exec(compile(text, name, "exec"), variables)
    return variables


Local = make_local(1.5)
Notebook = run_cell(CELL, "/tmp/ipykernel_1/1234.py")["Notebook"]
exec_only: dict[str, Any] = {}
exec(CELL.replace("Notebook", "NoSource"), exec_only)
NoSource = exec_only["NoSource"]
PROCESSORS = [
    Constants,
    Imports,
    Helpers,
    Enums,
    Dataclasses,
    Classes,
    Metaclasses,
    Mixins,
    GlobalStatement,
    Generators,
    Local,
    Notebook,
    NoSource,
    Imported,
    ModuleAttributes,
    Submodules,
    TypeCheckingNames,
    Annotated,
    SharingHelpers,
    ClassTensors,
    Network,
    Trained,
    SetLater,
    UsesTokenizer,
]

if __name__ == "__main__":
    strings = {cls.__name__: cls.to_str() for cls in PROCESSORS}
    report = {
        cls.__name__: {"string": strings[cls.__name__], "expected": cls()(torch.zeros(2, 4)).tolist()}
        for cls in PROCESSORS
    }
    json.dump(report, sys.stdout)
