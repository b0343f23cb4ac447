"""Names and digests of processors in requests, resolved to installed and registered processors."""

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
from .processor_names import NAME_RULE, is_name, missing_message
from .registered_processors import NotRegistered, RegisteredProcessors


class InvalidName(ValueError):
    """A processor cannot be registered under a name."""


class NotDeletable(Exception):
    """The processor is installed by the operator, so clients cannot delete it."""


class NamedProcessors:
    """Resolves a name to the installed processor, if there is one, else to the tenant's registered one.

    Args:
        installed: the installed processors.
        registered: the registered ones.
    """

    def __init__(self, installed: Registry, registered: RegisteredProcessors) -> None:
        self._installed = installed
        self._registered = registered

    def list_all(self, tenant: str) -> list[ProcessorInfo]:
        """Return the installed processors by name, then the tenant's own by name and version."""
        installed = [installed_info(name, self._installed.get(name)) for name in self._installed]
        return installed + [registered_info(each) for each in self._registered.list_own(tenant)]

    def details(self, reference: str, tenant: str) -> ProcessorDetails:
        """Describe a processor by its name, name and version, or digest, with its source.

        Raises:
            NotRegistered: the tenant has no such processor.
        """
        if name := self._installed_name(reference):
            return installed_details(name, self._installed.get(name))
        if own := self._registered.find_own(reference, tenant):
            return registered_details(own[-1])
        raise self._missing(reference, tenant)

    def delete(self, reference: str, tenant: str) -> list[str]:
        """Delete a version that the tenant registered, or all versions of a name or of a digest.

        Returns:
            Their ids.

        Raises:
            NotRegistered: the tenant has no such processor.
            NotDeletable: it is installed.
        """
        if removed := self._registered.remove(reference, tenant):
            return [each.id for each in removed]
        if name := self._installed_name(reference):
            raise NotDeletable(f"{name} is installed: only the server's operator can remove it")
        raise self._missing(reference, tenant)

    def find(self, string: ProcessorString, tenant: str) -> ProcessorString:
        """As `resolve`, but do not count it as a use, and return the string itself if nothing is registered."""
        reference = self._reference(string)
        found = None if reference is None else self._registered.find(reference, tenant)
        return string if found is None else found.upload.string

    def resolve(self, string: ProcessorString, tenant: str) -> ProcessorString:
        """Replace the name or digest of a registered processor by its string. Return all other strings unchanged.

        Raises:
            NotRegistered: no such processor is registered.
        """
        reference = self._reference(string)
        if reference is None:
            return string
        if isinstance(string, RegisteredProcessor):
            return self._registered.use_digest(reference, tenant).upload.string
        if found := self._registered.use_name(reference, tenant):
            return found.upload.string
        raise self._missing(reference, tenant)

    def check_name(self, name: str, installed: str | None) -> None:
        """Refuse a name that requests could not use.

        Args:
            name: the name to register under.
            installed: the name of the installed processor that is to be registered; None: it is not an installed one.

        Raises:
            InvalidName: it is malformed, or the name of another processor that is installed.
        """
        if not is_name(name):
            raise InvalidName(f"{name[:80]!r} is not a name for a registered processor, which has {NAME_RULE}")
        if name in self._installed and name != installed:
            raise InvalidName(
                f"{name!r} is the name of an installed processor, and requests with it get that one: choose another"
            )

    def _reference(self, string: ProcessorString) -> str | None:
        """Return the digest or name of a registered processor; None for all other strings."""
        if isinstance(string, RegisteredProcessor):
            return string.digest
        if isinstance(string, InstalledProcessor) and string.name not in self._installed:
            return string.name
        return None

    def _installed_name(self, reference: str) -> str | None:
        return next((name for name in self._installed if reference in (name, installed_digest(name))), None)

    def _missing(self, reference: str, tenant: str) -> NotRegistered:
        return NotRegistered(missing_message(reference, self._installed, self._registered.names(tenant)))
