"""What a processor may change of its sequences in a call, kept in case the call fails."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from logitship.sampler.processors.request_view import RequestView

LARGEST_SNAPSHOT = 4096
"""Bytes that a member's values may take."""

_CLASSES = frozenset({complex, Counter, OrderedDict, defaultdict, deque})
_FACTORIES = _CLASSES | {bool, dict, float, int, list, set, str, tuple}
"""What a snapshot may name: for the values that it holds, and for those that a `defaultdict` makes."""


class GroupMember(Protocol):
    """A sequence of a group.

    Attributes:
        params: what the processor receives for its row, `__req__` included.
        view: the same `__req__`.
        restorable: True at first. False from when its values were found to be too large or not plain, so that they are
            not looked at in every step.
        kept: None at first; then the parameters as they were, in containers of its own; empty once they have changed.
            Those of most processors never do, and to compare them costs a fraction of writing them down.
    """

    params: dict[str, Any]
    view: RequestView
    restorable: bool
    kept: dict[str, Any] | None


class GroupSnapshot:
    """The members of a group as they are now, those that can be restored: its length says how many.

    Kept are the values in `params` and `view.state`, as long as they are plain ones (numbers, text, bytes, None, lists,
    tuples, dicts, sets, and their like of `collections`) of at most `LARGEST_SNAPSHOT` bytes a member; and how many
    tokens the view's lists hold.

    Args:
        members: one a row.
    """

    def __init__(self, members: Sequence[GroupMember]) -> None:
        places = [place for row, member in enumerate(members) if (place := _place(row, member)) is not None]
        # All in one pickle: that takes a fraction of the time of one each.
        values = _pickled(places)
        if values is None or len(values) > LARGEST_SNAPSHOT * len(places):
            places = [place for place in places if _is_restorable(place)]
            values = _pickled(places)
        self._places = places if values is not None else []
        self._values = values or _NO_VALUES
        for place in self._places:
            if place.member.kept is None:
                place.member.kept = _copy_of(place.member.params)

    def __len__(self) -> int:
        return len(self._places)

    def restore(self) -> set[int]:
        """Put everything back, once.

        Returns:
            The rows whose members are as they were. The others were not restorable, or lost tokens.
        """
        if self._values is _NO_VALUES:
            return {place.row for place in self._places if _restore(place, None, {})}
        values = pickle.loads(self._values)
        return {place.row for place, old in zip(self._places, values, strict=True) if _restore(place, *old)}


class _Place(NamedTuple):
    """Where a member keeps what is restored."""

    row: int
    member: GroupMember
    state: dict[Any, Any]
    prompt: list[int]
    output: list[int]
    num_prompt: int
    num_output: int


_NO_VALUES = b""


def _place(row: int, member: GroupMember) -> _Place | None:
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
    return _Place(row, member, state, prompt, output, len(prompt), len(output))


def _is_restorable(place: _Place) -> bool:
    values = _pickled([place])
    place.member.restorable = values is not None and len(values) <= LARGEST_SNAPSHOT
    return place.member.restorable


def _pickled(places: Sequence[_Place]) -> bytes | None:
    """The parameters that change, and the states; `_NO_VALUES` if there are none; None if some are not plain."""
    values = [(_changing_params(place.member), place.state) for place in places]
    if not any(params or state for params, state in values):
        return _NO_VALUES
    file = io.BytesIO()
    try:
        _PlainPickler(file, protocol=5).dump(values)
    except Exception:  # noqa: BLE001  # not plain, nested too deep
        return None
    return file.getvalue()


def _changing_params(member: GroupMember) -> dict[str, Any] | None:
    """The parameters, without `__req__`; None if they are as they were kept."""
    if member.kept:
        try:
            if member.params == member.kept:
                return None
        # Whatever was put in there may not know what it equals.
        except Exception:  # noqa: BLE001
            pass
        member.kept = {}
    params = member.params.copy()
    params.pop("__req__", None)
    return params


def _copy_of(params: dict[str, Any]) -> dict[str, Any]:
    """A copy with containers of its own, and the same `__req__` and atoms; empty if it cannot be made."""
    view = params.get("__req__")
    try:
        return copy.deepcopy(params, {id(view): view})
    except RecursionError:  # a pickle may be nested deeper than this
        return {}


def _restore(place: _Place, params: dict[str, Any] | None, state: dict[Any, Any]) -> bool:
    if len(place.prompt) < place.num_prompt or len(place.output) < place.num_output:
        return False
    del place.prompt[place.num_prompt :], place.output[place.num_output :]
    # The same objects as before: the processor may have put others in their place, or keep these.
    view = place.member.view
    view.origin_input_ids, view.output_ids, view.state = place.prompt, place.output, place.state
    place.state.clear()
    place.state.update(state)
    if params is None:
        params = _copy_of(place.member.kept or {})
    place.member.params.clear()
    place.member.params.update(params, __req__=view)
    return True


class _PlainPickler(pickle.Pickler):
    """Refuses what is not plain. (marshal would be as fast, and silently turns a number of numpy's into bytes.)"""

    def reducer_override(self, obj: Any) -> Any:
        """Asked for everything but the built-in types, which the pickler writes by itself."""
        kind = type(obj)
        if kind in _CLASSES or (kind is type and obj in _FACTORIES):
            return NotImplemented
        raise pickle.PicklingError("not a plain value")
