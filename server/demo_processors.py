"""The two processors that `logitship demo` ships, written as an author would write them."""

from __future__ import annotations

from typing import Any

import torch

from logitship.client.processor import CustomLogitProcessor

WORD_STARTS = ("Ġ", "▁")
"""How byte-level and SentencePiece vocabularies write the space before a word."""


class Lipogram(CustomLogitProcessor):
    """Writes without a letter: no token that contains `custom_params["letter"]` can be drawn."""

    def __init__(self) -> None:
        self.banned: dict[str, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Set the logits of these tokens to -inf."""
        for row, params in enumerate(custom_param_list or ()):
            logits[row, self.tokens_with(params["letter"], params["__req__"]).to(logits.device)] = -torch.inf
        return logits

    def tokens_with(self, letter: str, request: Any) -> torch.Tensor:
        """Bool [vocab]: the tokens with this letter. Kept on `self` for the next step and the next request."""
        if letter not in self.banned:
            tokens = request.tokenizer.convert_ids_to_tokens(range(request.vocab_size))
            banned = torch.tensor([letter in (token or "").lower() for token in tokens])
            banned[list(request.eos_token_ids)] = False  # the end token may have the letter in its name
            self.banned[letter] = banned
        return self.banned[letter]


class Alliteration(CustomLogitProcessor):
    """Likes words that begin with `custom_params["letter"]`: adds `bias` to the logits of their first tokens."""

    def __init__(self) -> None:
        self.liked: dict[str, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Add the bias."""
        for row, params in enumerate(custom_param_list or ()):
            liked = self.words_with(params["letter"], params["__req__"]).to(logits.device)
            logits[row] += params.get("bias", 3.0) * liked
        return logits

    def words_with(self, letter: str, request: Any) -> torch.Tensor:
        """float32 [vocab]: 1 for tokens that begin a word with this letter, else 0."""
        if letter not in self.liked:
            beginnings = tuple(start + case for start in WORD_STARTS for case in (letter.lower(), letter.upper()))
            tokens = request.tokenizer.convert_ids_to_tokens(range(request.vocab_size))
            self.liked[letter] = torch.tensor([float((token or "").startswith(beginnings)) for token in tokens])
        return self.liked[letter]
