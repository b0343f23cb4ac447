"""What the names and digests in requests stand for: installed processors, and those that clients registered."""

from __future__ import annotations

from logitship.builtin_processors.registry import Registry
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, RegisteredProcessor

from .processor_descriptions import (
    installed_details,
    installed_digest,
    installed_info,
    registered_details,
    registered_info,
)
from .processor_names import NAME_RULE, is_name, why_missing
from .registered_processors import NotRegistered, RegisteredProcessors


class InvalidName(ValueError):
    """A processor cannot be registered under a name."""


class NotDeletable(Exception):
    """It is the operator's, not a client's."""


class NamedProcessors:
    """A name is that of an installed processor if there is one, else of what its tenant registered.

    Args:
        installed: the installed processors.
        registered: the registered ones.
    """

    def __init__(self, installed: Registry, registered: RegisteredProcessors) -> None:
        self._installed = installed
        self._registered = registered

    def of(self, tenant: str) -> list[ProcessorInfo]:
        """The installed processors by name, then the tenant's own by name and version."""
        installed = [installed_info(name, self._installed.get(name)) for name in self._installed]
        return installed + [registered_info(each) for each in self._registered.of(tenant)]

    def details(self, reference: str, tenant: str) -> ProcessorDetails:
        """What a name, a name and version, or a digest stands for, with its source.

        Raises:
            NotRegistered: nothing that this tenant may see.
        """
        if name := self._installed_name(reference):
            return installed_details(name, self._installed.get(name))
        if own := self._registered.own(reference, tenant):
            return registered_details(own[-1])
        raise self._missing(reference, tenant)

    def delete(self, reference: str, tenant: str) -> list[str]:
        """Drop a version of the tenant's, or all versions of a name or of a digest.

        Returns:
            Their ids.

        Raises:
            NotRegistered: there are none.
            NotDeletable: it is installed.
        """
        if removed := self._registered.remove(reference, tenant):
            return [each.id for each in removed]
        if name := self._installed_name(reference):
            raise NotDeletable(f"{name} is installed: only the server's operator can take it away")
        raise self._missing(reference, tenant)

    def find(self, string: ProcessorString, tenant: str) -> ProcessorString:
        """As `resolve`, without counting as a use; the string itself if it stands for nothing."""
        reference = self._reference(string)
        found = None if reference is None else self._registered.find(reference, tenant)
        return string if found is None else found.upload.string

    def resolve(self, string: ProcessorString, tenant: str) -> ProcessorString:
        """What a registered one's name or digest stands for now. A string that says all itself stands for itself.

        Raises:
            NotRegistered: it stands for nothing.
        """
        reference = self._reference(string)
        if reference is None:
            return string
        if isinstance(string, RegisteredProcessor):
            return self._registered.with_digest(reference, tenant).upload.string
        if found := self._registered.named(reference, tenant):
            return found.upload.string
        raise self._missing(reference, tenant)

    def check_name(self, name: str, installed: str | None) -> None:
        """Refuse a name that no request could mean.

        Args:
            installed: the name of the installed processor that is to be registered; None: it is another's code.

        Raises:
            InvalidName: says why.
        """
        if not is_name(name):
            raise InvalidName(f"{name[:80]!r} is not a name for a registered processor, which has {NAME_RULE}")
        if name in self._installed and name != installed:
            raise InvalidName(
                f"{name!r} is the name of an installed processor, and requests with it get that one: choose another"
            )

    def _reference(self, string: ProcessorString) -> str | None:
        """What a registered processor is asked for by; None for all other strings."""
        if isinstance(string, RegisteredProcessor):
            return string.digest
        if isinstance(string, InstalledProcessor) and string.name not in self._installed:
            return string.name
        return None

    def _installed_name(self, reference: str) -> str | None:
        return next((name for name in self._installed if reference in (name, installed_digest(name))), None)

    def _missing(self, reference: str, tenant: str) -> NotRegistered:
        return NotRegistered(why_missing(reference, self._installed, self._registered.names(tenant)))
