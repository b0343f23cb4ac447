"""The format of trees: RTP-LLM's files, and the same as an object in a request.

```json
{"start_token_id": 225, "end_token_id": 2, "sep": "_", "prefix_dict": {"225": [64000, 64003], "225_64000": [2]}}
```

All keys are optional. Others are ignored, but a value without a name (`""`) must not be nested. RTP-LLM reads files
with two parsers: a streaming one, whose rules this module implements, and, if that finds no JSON at all, an older one,
which also accepts comments. Here, such a file is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from logitship.builtin_processors.params import shown

from .token_tree import DEFAULT_END_TOKEN_ID, DEFAULT_SEP, DEFAULT_START_TOKEN_ID, TokenTree

logger = logging.getLogger(__name__)

_MAX_TOKEN_ID = 2**31 - 1
_INT = frozenset({int})


class TreeFormatError(ValueError):
    """The value is not a tree; the message names the position."""


class _Object(list[tuple[str, Any]]):
    """A JSON object as a list of members, because a name may occur twice."""


def load_tree(path: str | Path) -> TokenTree:
    """Read a tree from a file.

    Raises:
        OSError: the file cannot be read.
        TreeFormatError: the file does not contain a tree.
    """
    try:
        text = Path(path).read_bytes().decode()
        root = json.loads(text, object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TreeFormatError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, NaN, a number of thousands of digits; nested too deep
        raise TreeFormatError(f"is not JSON: {error}") from None
    reader = _TreeParser()
    tree = reader.read(root)
    if reader.num_dropped:
        logger.warning("%s: left out %d token ids that are negative or above 2^31 - 1", path, reader.num_dropped)
    if tree.start.path not in tree:
        logger.warning(
            "%s: prefix_dict has no key %r, where every sequence starts: only the EOS token %d can be sampled",
            path,
            tree.start.path,
            tree.end_token_id,
        )
    return tree


def read_tree(value: object) -> TokenTree:
    """Read a tree from a request.

    Args:
        value: parsed JSON.

    Raises:
        TreeFormatError: it is not a tree.
    """
    return _TreeParser().read(value)


class _TreeParser:
    """Parses the members of a tree.

    Attributes:
        num_dropped: number of candidates dropped, because no vocabulary contains them.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._candidates: dict[str, list[int]] = {}
        self._token_ids = {"start_token_id": DEFAULT_START_TOKEN_ID, "end_token_id": DEFAULT_END_TOKEN_ID}
        self._sep = DEFAULT_SEP

    def read(self, root: object) -> TokenTree:
        """Return the tree. If a name occurs twice, the last one wins, but `prefix_dict`s are merged."""
        for name, value in _members(root, ""):
            if name == "prefix_dict":
                self._read_candidates(value)
            elif name in self._token_ids:
                self._token_ids[name] = _token_id(value, name)
            elif name == "sep":
                if not isinstance(value, str):
                    _refuse(name, "a string", value)
                self._sep = value
            elif not name:
                _check_nameless(value)
        return TokenTree(self._candidates, sep=self._sep, **self._token_ids)

    def _read_candidates(self, value: object) -> None:
        for path, tokens in _members(value, "prefix_dict"):
            if not path:
                if isinstance(tokens, list | Mapping):
                    raise TreeFormatError(f"{_at(path)}: a path cannot be empty")
                continue
            if not isinstance(tokens, list) or isinstance(tokens, _Object):
                _refuse(_at(path), "an array of integers", tokens)
            # A tree may have a hundred thousand paths: without a loop over the tokens of usual ones.
            if not tokens or (_INT.issuperset(map(type, tokens)) and min(tokens) >= 0 and max(tokens) <= _MAX_TOKEN_ID):
                self._candidates[path] = tokens
            else:
                self._candidates[path] = self._read_tokens(path, tokens)

    def _read_tokens(self, path: str, tokens: list[Any]) -> list[int]:
        for index, token in enumerate(tokens):
            # True is an integer in Python, and RTP-LLM parses integers beyond 64 bits as floating-point numbers.
            if type(token) is not int or not -(2**63) <= token < 2**64:
                _refuse(f"{_at(path)}[{index}]", "an integer", token)
        kept = [token for token in tokens if 0 <= token <= _MAX_TOKEN_ID]
        self.num_dropped += len(tokens) - len(kept)
        return kept


def _at(path: str) -> str:
    return f"prefix_dict[{shown(path)}]"


def _members(value: object, at: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, _Object):
        return value
    if not isinstance(value, Mapping):
        _refuse(at, "an object", value)
    for name in value:
        if not isinstance(name, str):
            _refuse(at, "keys that are strings", name)
    return value.items()


def _token_id(value: object, at: str) -> int:
    if type(value) is not int or not -(2**31) <= value <= _MAX_TOKEN_ID:
        _refuse(at, "an integer of 32 bits", value)
    return value


def _check_nameless(value: object) -> None:
    """Check a member whose name is empty: RTP-LLM refuses nested values in it."""
    inner = [each for _, each in _members(value, "")] if isinstance(value, _Object | Mapping) else [value]
    if any(isinstance(each, list | Mapping) for each in inner):
        raise TreeFormatError('the member without a name ("") holds an array or an object')


def _refuse(at: str, expected: str, value: object) -> NoReturn:
    if isinstance(value, _Object | Mapping):
        got = "an object"
    elif isinstance(value, list):
        got = "an array"
    else:
        got = "null" if value is None else shown(value)
    raise TreeFormatError(f"{at}: expected {expected}, got {got}" if at else f"expected {expected}, got {got}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
