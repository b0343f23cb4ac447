"""Draft tokens, which an engine verifies in one step: a chain, or a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
    def chain(cls, first_row: int, drafts: Sequence[int]) -> DraftTree:
        """Make a tree of draft tokens that follow each other, as do their rows."""
        return cls(first_row, [-1, *drafts], {node: [node + 1] for node in range(len(drafts))}, {})

    @classmethod
    def from_links(
        cls, first_row: int, tokens: Sequence[int], first_children: Sequence[int], next_siblings: Sequence[int]
    ) -> DraftTree:
        """Make a tree from links between its nodes.

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
