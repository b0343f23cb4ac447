from __future__ import annotations

from types import SimpleNamespace

import torch

from logitship.server.runtime.draft_tree import DraftTree
from logitship.server.sglang.verify_input import MaskThenEdit, read_trees


def test_tree_from_links() -> None:
    """Node 0 has the children 1 and 3, and 1 has the child 2; 4 is not linked."""
    tree = DraftTree.from_links(10, [7, 8, 9, 6, 0], [1, 2, -1, -1, -1], [-1, 3, -1, -1, -1])
    assert tree.children == {0: [1, 3], 1: [2]}
    assert tree.copies == {}
    assert tree.first_row == 10


def test_siblings_with_the_same_token_are_one() -> None:
    """Nodes 1 and 2 have the same token, and each has a child: 3 and 4 with the same token, 5 with another one."""
    tree = DraftTree.from_links(0, [7, 8, 8, 5, 5, 4], [1, 3, 4, -1, -1, -1], [-1, 2, -1, -1, 5, -1])
    assert tree.children == {0: [1], 1: [4, 5]}
    assert tree.copies == {2: 1, 3: 4}


def test_trees_of_a_batch() -> None:
    verify_input = SimpleNamespace(
        draft_token=torch.tensor([7, 8, 9, 6]),
        retrieve_next_token=torch.tensor([[1, -1], [-1, -1]]),
        retrieve_next_sibling=torch.tensor([[-1, -1], [-1, -1]]),
    )
    first, second = read_trees(verify_input)
    assert (first.first_row, list(first.tokens), first.children) == (0, [7, 8], {0: [1]})
    assert (second.first_row, list(second.tokens), second.children) == (2, [9, 6], {})


def test_edits_come_after_the_mask() -> None:
    logits = torch.zeros(2)
    mask = SimpleNamespace(apply=lambda logits: logits.add_(1))
    MaskThenEdit(mask, lambda logits: logits.mul_(2)).apply(logits)  # type: ignore[arg-type, return-value]
    assert logits.tolist() == [2, 2]
    MaskThenEdit(None, lambda logits: logits.mul_(2)).apply(logits)  # type: ignore[arg-type, return-value]
    assert logits.tolist() == [4, 4]
