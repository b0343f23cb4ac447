"""`RowProcessor` and `Row`: processors that are written for one row at a time.

Both are serialized by value with the author's class, so that its string runs on stock SGLang. No method of `Row` uses
the value of a logit: calls may begin before the logits exist.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from .processor import CustomLogitProcessor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class Row:
    """One sequence in a call: its history, its parameters, and the logits of its next token."""

    __slots__ = ("_index", "_logits", "_view", "params", "request")

    params: dict[str, Any]
    """The request's `custom_params`, and `"__req__"`."""
    request: Any
    """`__req__`: the request with all its attributes, under SGLang's names."""

    def __init__(self, logits: torch.Tensor, index: int, params: dict[str, Any]) -> None:
        self._logits = logits
        self._index = index
        self._view: torch.Tensor | None = None
        self.params = params
        self.request = params["__req__"]

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        token_ids: list[int] = self.request.origin_input_ids
        return token_ids

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the output so far. The logits are for the next token."""
        token_ids: list[int] = self.request.output_ids
        return token_ids

    @property
    def state(self) -> dict[Any, Any]:
        """Dict for this processor in this sequence, empty at first.

        On stock SGLang, which has none, it is kept in the request's parameters.
        """
        state: dict[Any, Any] | None = getattr(self.request, "state", None)
        return self.params.setdefault("__state__", {}) if state is None else state

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer; only read it."""
        return self.request.tokenizer

    @property
    def eos_token_ids(self) -> list[int]:
        """The model's EOS tokens: `row.allow_only(row.eos_token_ids)` ends the answer."""
        token_ids = self.request.eos_token_ids
        return sorted(token_ids if token_ids is not None else [self.tokenizer.eos_token_id])

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._logits.shape[-1]

    @property
    def logits(self) -> torch.Tensor:
        """The logits, float32 [vocabulary]: edit them in place, or set others."""
        if self._view is None:
            self._view = self._logits[self._index]
        return self._view

    @logits.setter
    def logits(self, values: torch.Tensor) -> None:
        if values is not self._view:  # `row.logits *= 2` sets what it has edited
            self._logits[self._index] = values

    def forbid(self, token_ids: int | Iterable[int]) -> None:
        """Forbid tokens."""
        self._logits[self._index, self._indices(token_ids)] = -float("inf")

    def allow_only(self, token_ids: int | Iterable[int]) -> None:
        """Forbid all other tokens. What is forbidden already stays forbidden."""
        indices = self._indices(token_ids)
        kept = self._logits[self._index, indices].clone()
        self._logits[self._index] = -float("inf")
        self._logits[self._index, indices] = kept

    def force(self, token_id: int) -> None:
        """Make a token the only one that is allowed. If it was forbidden, no token is left, which is an error."""
        self.allow_only(token_id)

    def bias(self, token_ids: int | Iterable[int], amount: float) -> None:
        """Add an amount to the logits of tokens: positive makes them more likely, negative less."""
        self._logits[self._index, self._indices(token_ids)] += amount

    def _indices(self, token_ids: Any) -> Any:
        """Return token ids as an index: a list, or the tensor that was given."""
        if isinstance(token_ids, int):
            return [token_ids]
        return token_ids if hasattr(token_ids, "dtype") else list(token_ids)


class RowProcessor(CustomLogitProcessor):
    """A `CustomLogitProcessor` that is called for each row: implement `edit` instead of `__call__`.

    ```python
    class Lipogram(RowProcessor):
        def edit(self, row: Row) -> None:
            row.forbid(row.params["token_ids"])
    ```
    """

    @abstractmethod
    def edit(self, row: Row) -> None:
        """Edit the logits of one row."""
        raise NotImplementedError

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Call `edit` for each row."""
        for index, params in enumerate(custom_param_list or []):
            self.edit(Row(logits, index, params))
        return logits
