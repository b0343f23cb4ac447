"""The tenant of a request, from its HTTP headers to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from logitship.server.api_keys import tenant_of

_FIELD = "logitship_tenant"
"""Key of `extra_args`. What a client sends there is overwritten."""
_tenant: ContextVar[str] = ContextVar("logitship_tenant", default="")


def tenant_of_key(verify_token: Callable[..., bool], middleware: Any, headers: Mapping[str, str]) -> bool:
    """Take the tenant from a valid API key. A hook around the method of vLLM's middleware that verifies keys."""
    is_valid = verify_token(middleware, headers)
    if is_valid:
        set_tenant(headers["Authorization"].partition(" ")[2])
    return is_valid


def set_tenant(name: str) -> None:
    """Set the tenant of the HTTP request that this task serves.

    Args:
        name: identifies it: its API key, or what a gateway calls it.
    """
    _tenant.set(tenant_of(name))


def current_tenant() -> str:
    """Return the tenant of the HTTP request that this task serves; "" if it has none."""
    return _tenant.get()


def write_tenant(params: Any, tenant: str) -> None:
    """Write the tenant into the parameters of a request.

    Args:
        params: vLLM's `SamplingParams`.
        tenant: the tenant; "" if it has none.
    """
    others = {name: value for name, value in params.extra_args.items() if name != _FIELD}
    params.extra_args = others | ({_FIELD: tenant} if tenant else {})


def read_tenant(params: Any) -> str:
    """Return what `write_tenant` wrote."""
    tenant: str = (params.extra_args or {}).get(_FIELD, "")
    return tenant
