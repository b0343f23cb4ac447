"""Trees of draft tokens, which SGLang verifies in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DraftTree:
    """The draft tokens of one request.

    Each node has a row of the logits, which follow its token. Node 0 is the last output token. A node that repeats a
    sibling's token is a copy of it.

    Attributes:
        first_row: the row of node 0.
        tokens: the token of each node.
        children: the children of each node that has some. Copies are left out, and their children are the original's.
        copies: copy → the original.
    """

    first_row: int
    tokens: Sequence[int]
    children: Mapping[int, Sequence[int]]
    copies: Mapping[int, int]

    @classmethod
    def from_links(
        cls, first_row: int, tokens: Sequence[int], first_children: Sequence[int], next_siblings: Sequence[int]
    ) -> DraftTree:
        """Make a tree from SGLang's links.

        Args:
            first_row: the row of node 0.
            tokens: the token of each node.
            first_children: the first child of each node; -1: none.
            next_siblings: the next sibling of each node; -1: none.
        """
        children: dict[int, list[int]] = {}
        copies: dict[int, int] = {}
        waiting = [0]
        while waiting:
            node = waiting.pop()
            original = copies.get(node, node)
            child = first_children[node]
            while child != -1:
                same = next((each for each in children.get(original, ()) if tokens[each] == tokens[child]), None)
                if same is None:
                    children.setdefault(original, []).append(child)
                else:
                    copies[child] = same
                waiting.append(child)
                child = next_siblings[child]
        return cls(first_row, tokens, children, copies)


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
