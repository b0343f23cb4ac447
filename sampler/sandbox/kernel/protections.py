"""What this kernel gives to protect the server from shipped code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import landlock, seccomp

_NO_FILTER = (
    "the kernel has no seccomp filters: use Linux 4.14 or later with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64, "
    "and a container profile that allows seccomp()"
)
_NO_BORDER = (
    "the kernel gives neither Landlock nor namespaces: switch Landlock on (Linux 5.13 or later, boot with "
    "lsm=landlock,…), or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0, a container profile that allows unshare and mount)"
)
_OTHERWISE = "On a network where every client is trusted, --processor-isolation none does without a sandbox."


@dataclass(frozen=True)
class Protections:
    """What sandboxes are protected with.

    Attributes:
        seccomp: system calls are filtered.
        landlock_abi: version of Landlock; 0 is none.
        namespaces: those that the zygote entered, as `namespaces.enter` names them.
        jail_root: the zygote has a root directory with nothing in it but libraries.
        uid_drop: sandboxes run as another user than the zygote.
    """

    seccomp: bool
    landlock_abi: int = 0
    namespaces: tuple[str, ...] = ()
    jail_root: bool = False
    uid_drop: bool = False

    @property
    def sufficient(self) -> bool:
        """Whether shipped code may run: its system calls are filtered, and a second mechanism stands behind that."""
        return self.seccomp and (self.landlock_abi > 0 or self.jail_root or bool(self.namespaces))

    def missing(self) -> str:
        """What is missing and what the operator can do about it, in sentences; `""` if the protections suffice."""
        if self.sufficient:
            return ""
        reason = _NO_BORDER if self.seccomp else _NO_FILTER
        return f"Shipped processors cannot be sandboxed here: {reason}. {_OTHERWISE}"

    def describe(self) -> str:
        """One line for the log: what there is, and what there is not."""
        parts = list(self._parts())
        there = ", ".join(name for name, given in parts if given) or "nothing"
        absent = ", ".join(name for name, given in parts if not given)
        return there + (f"; without {absent}" if absent else "")

    def _parts(self) -> Iterator[tuple[str, bool]]:
        yield "seccomp filter", self.seccomp
        yield f"Landlock (ABI {self.landlock_abi})" if self.landlock_abi else "Landlock", self.landlock_abi > 0
        yield f"namespaces ({', '.join(self.namespaces)})" if self.namespaces else "namespaces", bool(self.namespaces)
        yield "root directory of its own", self.jail_root
        yield "change of user", self.uid_drop

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Protections:
        """Undo `to_json`.

        Raises:
            ValueError: it is no such text.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**{**fields, "namespaces": tuple(fields["namespaces"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a record of protections: {text[:200]!r}") from error


def probe() -> Protections:
    """What can be known without changing anything: `seccomp` and `landlock_abi`. The zygote adds the rest."""
    return Protections(seccomp=seccomp.available(), landlock_abi=landlock.abi())
