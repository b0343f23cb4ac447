"""Snapshots of the state that a processor may change in a call, to restore it if the call fails."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from logitship.sampler.processors.request_view import RequestView

MAX_SNAPSHOT = 4096
"""Limit in bytes for the values of a member, if those of all members take more on average."""

_CLASSES = frozenset({complex, Counter, OrderedDict, defaultdict, deque})
_FACTORIES = _CLASSES | {bool, dict, float, int, list, set, str, tuple}
"""Classes that a pickled snapshot may refer to: types of its values, and factories of a `defaultdict`."""


class GroupMember(Protocol):
    """A sequence of a group.

    Attributes:
        params: the parameters that the processor receives for its row, `__req__` included.
        view: the same `__req__`.
        restorable: True initially. Set to False once its values are found to be too large or not plain, so that they
            are not checked again in every step.
        params_copy: None initially; then a copy of the parameters; empty once they have changed. Most processors never
            change their parameters, and comparing is much cheaper than pickling.
    """

    params: dict[str, Any]
    view: RequestView
    restorable: bool
    params_copy: dict[str, Any] | None


class GroupSnapshot:
    """The current state of a group's members. Its length is the number of members that can be restored.

    It holds the values in `params` and `view.state`, if they are plain (numbers, text, bytes, None, lists, tuples,
    dicts, sets, and the containers of `collections`) and take at most `MAX_SNAPSHOT` bytes, or those of all
    members take no more on average; and the lengths of the view's token lists.

    Args:
        members: one per row.
    """

    def __init__(self, members: Sequence[GroupMember]) -> None:
        saved = [entry for row, member in enumerate(members) if (entry := _save(row, member)) is not None]
        # One pickle for all: much faster than one per member.
        values = _pickle_values(saved)
        if values is None or len(values) > MAX_SNAPSHOT * len(saved):
            saved = [entry for entry in saved if _is_restorable(entry)]
            values = _pickle_values(saved)
        self._saved = saved if values is not None else []
        self._values = values or _NO_VALUES
        for entry in self._saved:
            if entry.member.params_copy is None:
                entry.member.params_copy = _copy_of(entry.member.params)

    def __len__(self) -> int:
        return len(self._saved)

    def restore(self) -> set[int]:
        """Restore the members. May be called once.

        Returns:
            The rows whose members were restored. The others were not restorable, or lost tokens.
        """
        if self._values is _NO_VALUES:
            return {entry.row for entry in self._saved if _restore(entry, None, {})}
        values = pickle.loads(self._values)
        return {entry.row for entry, old in zip(self._saved, values, strict=True) if _restore(entry, *old)}


class _SavedMember(NamedTuple):
    """A member, and the containers that are restored in place."""

    row: int
    member: GroupMember
    state: dict[Any, Any]
    prompt: list[int]
    output: list[int]
    num_prompt: int
    num_output: int


_NO_VALUES = b""


def _save(row: int, member: GroupMember) -> _SavedMember | None:
    if not member.restorable:
        return None
    try:
        state, prompt, output = member.view.state, member.view.origin_input_ids, member.view.output_ids
    except AttributeError:  # deleted
        member.restorable = False
        return None
    if type(state) is not dict or type(prompt) is not list or type(output) is not list:
        member.restorable = False
        return None
    return _SavedMember(row, member, state, prompt, output, len(prompt), len(output))


def _is_restorable(entry: _SavedMember) -> bool:
    values = _pickle_values([entry])
    entry.member.restorable = values is not None and len(values) <= MAX_SNAPSHOT
    return entry.member.restorable


def _pickle_values(saved: Sequence[_SavedMember]) -> bytes | None:
    """Pickle changing parameters and states. `_NO_VALUES` if there are none, None if some are not plain."""
    values = [(_changing_params(entry.member), entry.state) for entry in saved]
    if not any(params or state for params, state in values):
        return _NO_VALUES
    file = io.BytesIO()
    try:
        _PlainPickler(file, protocol=5).dump(values)
    # The values are not plain, or nested too deep.
    except Exception:  # noqa: BLE001  # boundary: author code
        return None
    return file.getvalue()


def _changing_params(member: GroupMember) -> dict[str, Any] | None:
    """Return the parameters without `__req__`; None if they equal `params_copy`."""
    if member.params_copy:
        try:
            if member.params == member.params_copy:
                return None
        # A value of the processor's own may raise when compared.
        except Exception:  # noqa: BLE001  # boundary: author code
            pass
        member.params_copy = {}
    params = member.params.copy()
    params.pop("__req__", None)
    return params


def _copy_of(params: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy that shares `__req__`; empty if the copy fails."""
    view = params.get("__req__")
    try:
        return copy.deepcopy(params, {id(view): view})
    except RecursionError:  # pickle handles deeper nesting than copy
        return {}


def _restore(entry: _SavedMember, params: dict[str, Any] | None, state: dict[Any, Any]) -> bool:
    if len(entry.prompt) < entry.num_prompt or len(entry.output) < entry.num_output:
        return False
    del entry.prompt[entry.num_prompt :], entry.output[entry.num_output :]
    # Restore the same objects: the processor may have replaced them, or keep references to them.
    view = entry.member.view
    view.origin_input_ids, view.output_ids, view.state = entry.prompt, entry.output, entry.state
    entry.state.clear()
    entry.state.update(state)
    if params is None:
        params = _copy_of(entry.member.params_copy or {})
    entry.member.params.clear()
    entry.member.params.update(params, __req__=view)
    return True


class _PlainPickler(pickle.Pickler):
    """A pickler that refuses values that are not plain; marshal would silently write a numpy number as bytes."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse all types but `_CLASSES`. Not called for built-in types, which the pickler writes by itself."""
        kind = type(obj)
        if kind in _CLASSES or (kind is type and obj in _FACTORIES):
            return NotImplemented
        raise pickle.PicklingError("not a plain value")
