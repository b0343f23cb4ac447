"""Compiles grammars, with a cache."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from hashlib import sha256
from typing import Any

from llguidance import LLMatcher

from logitship.builtin_processors.params import ModelFacts

from . import check
from .checker import GrammarChecker


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
        model: the model.
        max_grammars: size of the LRU cache.
        deadline: maximum CPU seconds per grammar.

    Raises:
        ValueError: llguidance does not support the model's tokenizer, or the model has no end token.
    """

    def __init__(self, model: ModelFacts, *, max_grammars: int = 128, deadline: float = 5.0) -> None:
        arguments = _tokenizer_arguments(model)
        self._tokenizer = check.make_tokenizer(**arguments)
        self._checker = GrammarChecker(arguments, deadline)
        self._max_grammars = max_grammars
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, LLMatcher | str] = OrderedDict()

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return (self._tokenizer.vocab_size + 31) // 32

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of the text. It is shared: copy it before consuming tokens.

        Args:
            grammar: a grammar in llguidance's syntax, see `grammar_source`.

        Raises:
            ValueError: the grammar is invalid, or too expensive to compile; says why.
            PreparationUnavailable: the grammar could not be checked.
        """
        key = sha256(grammar.encode()).digest()
        made = self._get(key)
        if made is None:
            made = self._make(grammar)
            with self._lock:
                self._known[key] = made
                while len(self._known) > self._max_grammars:
                    self._known.popitem(last=False)
        if isinstance(made, str):
            raise ValueError(made)
        return made

    def _get(self, key: bytes) -> LLMatcher | str | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _make(self, grammar: str) -> LLMatcher | str:
        """Return the matcher, or the error message, which is cached too: an expensive grammar may be sent again."""
        try:
            self._checker.check(grammar)
            return check.make_matcher(self._tokenizer, grammar)
        except ValueError as error:
            return str(error)


def _tokenizer_arguments(model: ModelFacts) -> dict[str, Any]:
    if not model.eos_token_ids:
        raise ValueError("a grammar needs a model with an end token, to end the text with")
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
