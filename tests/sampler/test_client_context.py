from __future__ import annotations

from logitship.sampler.client_context import Disconnect, current_tenant, on_behalf_of


def test_current_tenant() -> None:
    assert current_tenant.get() == ""
    with on_behalf_of("a"):
        assert current_tenant.get() == "a"
        with on_behalf_of("b"):
            assert current_tenant.get() == "b"
        assert current_tenant.get() == "a"
    assert current_tenant.get() == ""


def test_disconnect_calls_those_before_and_after_it() -> None:
    disconnect, called = Disconnect(), []
    disconnect.call_when_notified(lambda: called.append("before"))
    assert called == []
    disconnect.notify()
    disconnect.call_when_notified(lambda: called.append("after"))
    disconnect.notify()
    assert called == ["before", "after"]
