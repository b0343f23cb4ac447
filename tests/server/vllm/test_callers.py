from __future__ import annotations

from typing import Any

from logitship.server.vllm.callers import find_caller


class Base:
    def call(self) -> Any:
        return find_caller("Base"), find_caller("Derived"), find_caller("Unknown")


class Derived(Base):
    pass


class Outer:
    def call(self, inner: Base) -> Any:
        return [find_caller("Outer"), *inner.call()]


def test_find_caller_returns_nearest_instance_of_class() -> None:
    outer, base, derived = Outer(), Base(), Derived()
    assert base.call() == (base, None, None)
    assert derived.call() == (derived, derived, None)
    assert outer.call(derived) == [outer, derived, derived, None]
