"""The protections that this kernel provides for sandboxes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import landlock, seccomp

_NO_FILTER = (
    "the kernel has no seccomp filters: use Linux 5.3 or later with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64, "
    "and a container profile that allows seccomp()"
)
_NO_SECOND_LAYER = (
    "the kernel provides neither Landlock nor namespaces: enable Landlock (Linux 5.13 or later, boot with "
    "lsm=landlock,…), or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0, a container profile that allows unshare and mount)"
)
_OTHERWISE = "On a network where every client is trusted, --processor-isolation none does without a sandbox."


@dataclass(frozen=True)
class Protections:
    """The protections of the sandboxes.

    Attributes:
        seccomp: system calls are filtered.
        landlock_abi: ABI version of Landlock; 0 for none.
        namespaces: the namespaces that the zygote entered, as returned by `namespaces.enter`.
        jail_root: the zygote has a private root directory that holds only libraries.
        uid_drop: sandboxes run as a different user than the zygote.
    """

    seccomp: bool
    landlock_abi: int = 0
    namespaces: tuple[str, ...] = ()
    jail_root: bool = False
    uid_drop: bool = False

    @property
    def sufficient(self) -> bool:
        """True if system calls are filtered and there is a second layer: the requirement to run shipped code."""
        return self.seccomp and (self.landlock_abi > 0 or self.jail_root or bool(self.namespaces))

    def missing(self) -> str:
        """Return what is missing and how to fix it; "" if the protections are sufficient."""
        if self.sufficient:
            return ""
        reason = _NO_SECOND_LAYER if self.seccomp else _NO_FILTER
        return f"Shipped processors cannot be sandboxed here: {reason}. {_OTHERWISE}"

    def describe(self) -> str:
        """Return a line for the log that lists present and absent protections."""
        parts = list(self._parts())
        present = ", ".join(name for name, is_present in parts if is_present) or "nothing"
        absent = ", ".join(name for name, is_present in parts if not is_present)
        return present + (f"; without {absent}" if absent else "")

    def _parts(self) -> Iterator[tuple[str, bool]]:
        yield "seccomp filter", self.seccomp
        yield f"Landlock (ABI {self.landlock_abi})" if self.landlock_abi else "Landlock", self.landlock_abi > 0
        yield f"namespaces ({', '.join(self.namespaces)})" if self.namespaces else "namespaces", bool(self.namespaces)
        yield "root directory of its own", self.jail_root
        yield "change of user", self.uid_drop

    def to_json(self) -> str:
        """Serialize."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Protections:
        """Deserialize.

        Raises:
            ValueError: `text` was not written by `to_json`.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**{**fields, "namespaces": tuple(fields["namespaces"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a record of protections: {text[:200]!r}") from error


def probe() -> Protections:
    """Detect seccomp and Landlock, without side effects. The zygote adds the other protections."""
    return Protections(seccomp=seccomp.available(), landlock_abi=landlock.abi())
