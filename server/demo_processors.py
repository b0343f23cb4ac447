"""The two processors that `logitship demo` ships, written like a user's own."""

from __future__ import annotations

from typing import Any

import torch

from logitship.client.processor import CustomLogitProcessor

WORD_STARTS = ("Ġ", "▁")
"""Marks of a word start in byte-level and SentencePiece vocabularies."""


class Lipogram(CustomLogitProcessor):
    """Bans every token that contains the letter `custom_params["letter"]`."""

    def prepare(self, tokenizer: Any, vocab_size: int) -> None:
        """Read the vocabulary, once."""
        self.tokens = [(token or "").lower() for token in tokenizer.convert_ids_to_tokens(range(vocab_size))]
        self.banned: dict[str, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Set the logits of the banned tokens to -inf."""
        for row, params in enumerate(custom_param_list or ()):
            logits[row, self.tokens_with(params["letter"], params["__req__"]).to(logits.device)] = -torch.inf
        return logits

    def tokens_with(self, letter: str, request: Any) -> torch.Tensor:
        """Return bool [vocab]: the tokens with this letter. Cached on `self` for later steps and requests."""
        if letter not in self.banned:
            banned = torch.tensor([letter in token for token in self.tokens])
            banned[list(request.eos_token_ids)] = False  # the EOS token's name may contain the letter
            self.banned[letter] = banned
        return self.banned[letter]


class Alliteration(CustomLogitProcessor):
    """Boosts words that begin with `custom_params["letter"]`: adds `bias` to the logits of their first tokens."""

    def prepare(self, tokenizer: Any, vocab_size: int) -> None:
        """Read the vocabulary, once."""
        self.tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(range(vocab_size))]
        self.liked: dict[str, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Add the bias."""
        for row, params in enumerate(custom_param_list or ()):
            liked = self.words_with(params["letter"]).to(logits.device)
            logits[row] += params.get("bias", 3.0) * liked
        return logits

    def words_with(self, letter: str) -> torch.Tensor:
        """Return float32 [vocab]: 1 for tokens that begin a word with this letter, else 0."""
        if letter not in self.liked:
            beginnings = tuple(start + case for start in WORD_STARTS for case in (letter.lower(), letter.upper()))
            self.liked[letter] = torch.tensor([float(token.startswith(beginnings)) for token in self.tokens])
        return self.liked[letter]
