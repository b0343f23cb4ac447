"""Settings of the plugins for other engines: environment variables, because engines pass no arguments to plugins."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from logitship.builtin_processors.watermarks.watermark_key import WatermarkKey
from logitship.server.allowed_processors import read_allowed_digests
from logitship.server.config import ServerConfig
from logitship.server.default_processors import DefaultProcessor, read_default_processors

from .shared_directory import SHARED_DIRECTORY

SettingsT = TypeVar("SettingsT", bound="PluginSettings")


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """Settings that all plugins have. Each is read from the variable of the same name in capitals, after a prefix."""

    prefix: ClassVar[str]
    """The start of the variables' names, of the engine."""
    readers: ClassVar[Mapping[str, Callable[[str], Any]]]
    """Functions that read the value of each variable."""
    secrets: ClassVar[frozenset[str]] = frozenset()
    """Settings whose values are not shown."""

    processor_isolation: Literal["sandbox", "none"] = "sandbox"
    max_processor_size: int = ServerConfig.max_processor_size
    """Longest processor string, in bytes."""
    max_sandboxes: int = ServerConfig.max_sandboxes
    """Most shipped processors kept loaded in a process that runs a model."""
    max_artifact_size: int = ServerConfig.max_artifact_size
    """Largest uploaded artifact, in bytes."""
    artifact_cache_bytes: int = ServerConfig.artifact_cache_bytes
    """Most bytes of the artifacts of all clients together."""
    sandbox_memory: int = ServerConfig.sandbox_memory
    """Bytes that a sandbox may use beyond what torch uses."""
    sandbox_cpu_time: float = ServerConfig.sandbox_cpu_time
    """CPU seconds that a sandbox may use outside its calls."""
    sandbox_step_timeout: float = ServerConfig.sandbox_step_timeout
    """CPU seconds that the calls of processors may take in a step."""
    sandbox_first_step_timeout: float = ServerConfig.sandbox_first_step_timeout
    """CPU seconds that the first call in a sandbox may take, instead."""
    sandbox_load_timeout: float = ServerConfig.sandbox_load_timeout
    """CPU seconds that loading a processor may take."""
    step_share: float = 0.2
    """Share of the engine's own time that its steps wait for late processors, see `Allowances`."""
    allow_processor: str | None = None
    """A file with the digests of the only shipped processors that may run. None: any may."""
    num_tenants: int = 1
    """Number of API keys, or of tenants of a gateway: each can load a processor, whatever the others have loaded."""
    audit_log: str | None = None
    """A file that gets a line for each request with processors that ends, see `AuditLog`. None: no file."""
    tree: Mapping[str, str] | None = None
    """Trees that requests can name: name → file. In the environment `NAME=FILE`, several separated by commas."""
    default_processor: Sequence[str] = ()
    """Processors of every request, which run after its own, see `read_default_processors`. In the environment, one in
    each line."""
    watermark_key_file: str | None = None
    """A file with the secret of the watermarks. None: requests for a watermark are refused."""

    @classmethod
    def from_environment(cls: type[SettingsT], environment: Mapping[str, str] = os.environ) -> SettingsT:
        """Read the settings of this process.

        Raises:
            ValueError: the value of a variable is invalid, or there is no such setting; names the variable.
        """
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(cls.prefix):
                continue
            name = variable.removeprefix(cls.prefix).lower()
            read = cls.readers.get(name)
            if read is None:
                known = ", ".join(cls.prefix + name.upper() for name in cls.readers)
                raise ValueError(f"{variable}: there is no such setting; there are {known}")
            try:
                values[name] = read(text.strip())
            except ValueError as error:
                shown = "" if name in cls.secrets else f", not {text!r}"
                raise ValueError(f"{variable}: {error}{shown}") from None
        settings = cls(**values)
        # Read the files now, so that their errors show at start.
        settings.allowed_digests  # noqa: B018
        settings.default_processors  # noqa: B018
        settings.watermark_key  # noqa: B018
        return settings

    @property
    def request_body_timeout(self) -> float:
        """Seconds in which the body of an upload has to arrive."""
        return ServerConfig.request_body_timeout

    def in_own_words(self, message: str) -> str:
        """Return a message of logitship's own server with the plugin's variables in place of its flags."""
        for name in self.readers:
            message = re.sub(f"--{name.replace('_', '-')}\\b", self.prefix + name.upper(), message)
        return re.sub(r" \(--[a-z-]+\)", "", message)  # flags that the plugin lacks

    @property
    def shared_directory(self) -> Path | None:
        """Folder that the processes of the engine share; None: there is none on this host."""
        path = os.environ.get(SHARED_DIRECTORY)
        return None if path is None else Path(path)

    @property
    def num_keys(self) -> int:
        """Number of API keys that the settings have."""
        return 0

    @property
    def metrics_directory(self) -> str | None:
        """Folder in which the processes of the engine share their metrics; None: it has no `/metrics`."""
        return None

    @property
    def names_in_metrics(self) -> bool:
        """True if `/metrics`, which asks for no key, may name shipped classes: there is one tenant."""
        return max(self.num_tenants, self.num_keys) <= 1

    @property
    def shipping_is_off(self) -> str | None:
        """Reason why requests may not ship code; None: they may."""
        return None

    @cached_property
    def allowed_digests(self) -> frozenset[str] | None:
        """The digests in the file `allow_processor`; None: no file is set."""
        if self.allow_processor is None:
            return None
        try:
            return read_allowed_digests(self.allow_processor)
        except ValueError as error:
            raise ValueError(f"{self.prefix}ALLOW_PROCESSOR: {error}") from None

    @cached_property
    def default_processors(self) -> tuple[DefaultProcessor, ...]:
        """Parsed `default_processor`, with what is in its files."""
        try:
            return read_default_processors(self.default_processor)
        except ValueError as error:
            raise ValueError(f"{self.prefix}DEFAULT_PROCESSOR: {error}") from None

    @cached_property
    def watermark_key(self) -> WatermarkKey | None:
        """The key in the file `watermark_key_file`; None: no file is set."""
        if self.watermark_key_file is None:
            return None
        try:
            return WatermarkKey.read(self.watermark_key_file)
        except ValueError as error:
            raise ValueError(f"{self.prefix}WATERMARK_KEY_FILE: {error}") from None


def read_switch(text: str) -> bool:
    """Read the value of a variable that switches something on or off.

    Raises:
        ValueError: it is neither.
    """
    if text.lower() not in ("1", "true", "0", "false"):
        raise ValueError("must be 1 (true) or 0 (false)")
    return text.lower() in ("1", "true")


def _isolation(text: str) -> str:
    if text not in ("sandbox", "none"):
        raise ValueError("must be sandbox or none")
    return text


def _count(text: str) -> int:
    """Read the value of a variable that is a number of things.

    Raises:
        ValueError: it is none, or less than 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be an integer, 1 or greater")
    return int(text)


def _positive(text: str, what: str = "a number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"must be {what} above 0")
    return value


_seconds = partial(_positive, what="a number of seconds")


def _trees(text: str) -> dict[str, str]:
    trees: dict[str, str] = {}
    for entry in text.split(","):
        name, _, file = entry.strip().partition("=")
        if not name or not file or name in trees:
            raise ValueError("must be NAME=FILE, several separated by commas, each name once")
        trees[name] = file
    return trees


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line.strip())


SHARED_READERS: Mapping[str, Callable[[str], Any]] = {
    "processor_isolation": _isolation,
    "max_processor_size": _count,
    "max_artifact_size": _count,
    "artifact_cache_bytes": _count,
    "max_sandboxes": _count,
    "sandbox_memory": _count,
    "sandbox_cpu_time": _seconds,
    "sandbox_step_timeout": _seconds,
    "sandbox_first_step_timeout": _seconds,
    "step_share": _positive,
    "sandbox_load_timeout": _seconds,
    "num_tenants": _count,
    "allow_processor": str,
    "audit_log": str,
    "tree": _trees,
    "default_processor": _lines,
    "watermark_key_file": str,
}
