"""The draft tokens that SGLang verifies in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from logitship.server.runtime.draft_tree import DraftTree


def read_trees(verify_input: Any) -> list[DraftTree]:
    """Return the draft tokens of each row of the batch. Waits for the device.

    Args:
        verify_input: SGLang's `NgramVerifyInput`.
    """
    first_children = verify_input.retrieve_next_token
    tokens = verify_input.draft_token.view_as(first_children)
    links = torch.stack((tokens, first_children, verify_input.retrieve_next_sibling)).tolist()
    width = first_children.shape[1]
    return [DraftTree.from_links(row * width, *each) for row, each in enumerate(zip(*links, strict=True))]


@dataclass(frozen=True)
class MaskThenEdit:
    """Stands in for the mask of SGLang's grammars, which SGLang applies last before it verifies draft tokens.

    Attributes:
        mask: SGLang's own; None if no request has a grammar.
        edit: edits the logits after it.
    """

    mask: Any
    edit: Callable[[torch.Tensor], None]

    def apply(self, logits: torch.Tensor) -> None:
        """Edit the logits of all rows, in place."""
        if self.mask is not None:
            self.mask.apply(logits)
        self.edit(logits)
