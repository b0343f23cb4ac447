"""The kernel that reads trees of draft tokens."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write the position of each node, its first child and its next sibling, from the ancestors in the mask."""
    masks = tree_mask.view(batch_size, draft_token_num, draft_token_num).tolist()
    for request, (mask, length) in enumerate(zip(masks, verified_seq_len.tolist(), strict=True)):
        ancestors = [[other for other in range(node) if mask[node][other]] for node in range(draft_token_num)]
        parents = [each[-1] if each else -1 for each in ancestors]
        for node in range(draft_token_num):
            row = request * draft_token_num + node
            retrieve_index[request, node] = row
            positions[row] = length + len(ancestors[node])
            later = range(node + 1, draft_token_num)
            retrieve_next_token[request, node] = next((each for each in later if parents[each] == node), -1)
            same = (each for each in later if parents[node] >= 0 and parents[each] == parents[node])
            retrieve_next_sibling[request, node] = next(same, -1)
