"""Compiles grammars, with a cache."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from llguidance import LLMatcher

from logitship.builtin_processors.params import ModelFacts, PreparationUnavailable
from logitship.builtin_processors.parts.checker_process import TooMuchMemory
from logitship.sampler.cgroup_limits import num_cores
from logitship.sampler.client_context import current_tenant
from logitship.sampler.fair_slots import FairSlots
from logitship.sampler.round_robin_queue import TenantQueueFull

from . import check
from .checker import GrammarChecker

_MAX_REFUSALS = 4096
"""Refused grammars that are remembered: a client may send an expensive one again and again."""
_MAX_WAITING = 128
"""Grammars of a tenant that may wait for a checker."""
_Made = TypeVar("_Made")
_Key: TypeAlias = tuple[str, bytes]
"""Tenant, and digest of a grammar. Tenants share none: response times would reveal one's grammars to another."""


class TokenText(NamedTuple):
    """A token and its bytes."""

    token_id: int
    text: bytes


class GrammarCompiler:
    """Compiles grammars for one model. Tenants take turns; `current_tenant` is the one that a call is for.

    A grammar is compiled while its checker is in use, so that one tenant's grammars occupy few cores.

    Args:
        model: the model.
        max_grammars: size of the LRU cache. A tenant's grammars are evicted before those of tenants that have fewer.
        cpu_limit: maximum CPU seconds per grammar.
        timeout: maximum seconds to wait for other grammars, and for a checker's answer.
        num_checkers: checker processes, which start when they are needed; None: a quarter of the cores, at least 2.

    Raises:
        ValueError: llguidance does not support the model's tokenizer, or the model has no EOS token.
    """

    def __init__(
        self,
        model: ModelFacts,
        *,
        max_grammars: int = 128,
        cpu_limit: float = 5.0,
        timeout: float = 60.0,
        num_checkers: int | None = None,
    ) -> None:
        arguments = _tokenizer_arguments(model)
        self._tokenizer = check.make_tokenizer(**arguments)
        self._timeout = timeout
        count = num_checkers or max(2, num_cores() // 4)
        self._checkers = [GrammarChecker(arguments, cpu_limit, timeout) for _ in range(count)]
        self._slots = FairSlots(self._checkers, _MAX_WAITING)
        self._texts: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._compiled = _Recent[LLMatcher](max_grammars)
        self._refused = _Recent[str](_MAX_REFUSALS)
        self._slow_tenants: set[str] = set()
        """Tenants whose last grammar took long: the next ones begin at a low priority."""

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return (self._tokenizer.vocab_size + 31) // 32

    @property
    def num_checks(self) -> int:
        """Grammars that are being checked or compiled."""
        return self._slots.num_in_use

    @property
    def num_waiting(self) -> int:
        """Grammars that wait for a checker."""
        return self._slots.num_waiting

    def longest_token(self, token_ids: Collection[int]) -> TokenText | None:
        """Return the longest of some tokens if all others are its beginnings; None for special tokens."""
        texts = [self._text_of(token) for token in token_ids]
        longest = max(texts, key=len, default=b"")
        if not all(text and longest.startswith(text) for text in texts):
            return None
        return next((TokenText(*each) for each in zip(token_ids, texts, strict=True) if each[1] is longest), None)

    def _text_of(self, token: int) -> bytes:
        """Return the bytes of a token; none if it is special."""
        text = self._texts.get(token)
        if text is None:
            is_special = self._tokenizer.is_special_token(token)
            text = self._texts[token] = b"" if is_special else self._tokenizer.decode_bytes([token])
        return text

    def tokens_of_beginning(self, text: bytes) -> list[int]:
        """Return the tokens of a text, without those at its end that may become others when it continues."""
        token_ids, _ = self._tokenizer.tokenize_partial(text)
        return token_ids

    def usual_tokens(self, text: str) -> list[int] | None:
        """Return the tokens into which the tokenizer divides a text; None if special ones stand for parts of it."""
        token_ids = self._tokenizer.tokenize_str(text)
        return token_ids if b"".join(map(self._text_of, token_ids)) == text.encode() else None

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of the text. It is shared: copy it before consuming tokens.

        Args:
            grammar: a grammar in llguidance's syntax, see `grammar_source`.

        Raises:
            ValueError: the grammar is invalid, or too expensive to compile; says why.
            PreparationUnavailable: the grammar could not be checked.
        """
        key = current_tenant.get(), sha256(grammar.encode()).digest()
        known = self._known(key)
        if known is not None:
            return known
        try:
            with self._slots.use(key[0], self._timeout) as checker:
                # Another request may have sent the same grammar while this one waited.
                return self._known(key) or self._make(key, grammar, checker)
        except TenantQueueFull:
            raise PreparationUnavailable(
                f"{_MAX_WAITING} of your requests wait for their grammars to be checked: try again later"
            ) from None
        except TimeoutError:
            raise PreparationUnavailable("the server is checking other grammars: try again later") from None

    def _known(self, key: _Key) -> LLMatcher | None:
        """Return the matcher of a grammar that was compiled before; None if it was not. Raises if it was refused."""
        with self._lock:
            refusal = self._refused.get(key)
            if refusal is None:
                return self._compiled.get(key)
        raise ValueError(refusal)

    def _make(self, key: _Key, grammar: str, checker: GrammarChecker) -> LLMatcher:
        try:
            self._check(grammar, checker)
            matcher = check.make_matcher(self._tokenizer, grammar)
        except TooMuchMemory:  # or the machine has too little of it now
            raise
        except ValueError as error:
            with self._lock:
                self._refused.put(key, str(error))
            raise
        with self._lock:
            self._compiled.put(key, matcher)
        return matcher

    def _check(self, grammar: str, checker: GrammarChecker) -> None:
        tenant = current_tenant.get()
        try:
            checker.check(grammar, at_low_priority=tenant in self._slow_tenants)
        finally:
            if checker.took_long:
                self._slow_tenants.add(tenant)
            else:
                self._slow_tenants.discard(tenant)


class _Recent(Generic[_Made]):
    """LRU cache that is fair to tenants. Not thread-safe.

    Args:
        max_entries: most entries.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[_Key, _Made] = OrderedDict()

    def get(self, key: _Key) -> _Made | None:
        """Return an entry, which is the most recently used one then; None if there is none."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: _Key, made: _Made) -> None:
        """Add an entry. If there are too many, drop the least recently used one of the tenant that has most."""
        self._entries[key] = made
        if len(self._entries) > self._max_entries:
            count = Counter(tenant for tenant, _ in self._entries)
            del self._entries[max(self._entries, key=lambda each: count[each[0]])]  # the first of equals


def _tokenizer_arguments(model: ModelFacts) -> dict[str, Any]:
    if not model.eos_token_ids:
        raise ValueError("a grammar needs a model with an EOS token, to end the text with")
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("a grammar needs a tokenizer of Hugging Face's tokenizers library (a fast one)")
    backend = copy.copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return {
        "tokenizer_json": backend.to_str(),
        "vocab_size": max(model.vocab_size, backend.get_vocab_size(with_added_tokens=True)),
        "eos_token_ids": sorted(model.eos_token_ids),
    }
