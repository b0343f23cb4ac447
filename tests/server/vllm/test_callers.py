from __future__ import annotations

from typing import Any

from logitship.server.vllm.callers import calling


class Base:
    def call(self) -> Any:
        return calling("Base"), calling("Derived"), calling("Nobody")


class Derived(Base):
    pass


class Outer:
    def call(self, inner: Base) -> Any:
        return [calling("Outer"), *inner.call()]


def test_the_nearest_caller_of_a_class() -> None:
    outer, base, derived = Outer(), Base(), Derived()
    assert base.call() == (base, None, None)
    assert derived.call() == (derived, derived, None)
    assert outer.call(derived) == [outer, derived, derived, None]
