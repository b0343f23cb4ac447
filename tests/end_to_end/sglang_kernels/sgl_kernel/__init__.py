"""The kernels that speculation needs on a CPU, in torch; other names resolve, and calling one raises.

SGLang builds its CPU kernels from source: no package index has them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the places in the KV cache of the tokens from start to end of each request, one after the other."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    places = torch.cat([req_to_token[row, start:end] for row, start, end in bounds])
    out_cache_loc[: len(places)] = places


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Note new places in the KV cache as those of the tokens from start to end of each request."""
    used = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[used : used + end - start].to(req_to_token.dtype)
        used += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write the places in the KV cache of each request's next draft tokens."""
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    places = torch.cat([req_to_token[row, length : length + topk * num_steps] for row, length in rows])
    out_cache_loc[: len(places)] = places


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Write the last accepted token of each request."""
    bonus_tokens[:] = accept_tokens.view(-1, accept_stride).gather(1, accept_lens.long()[:, None] - 1).flatten()


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write the tree of each request: a mask of ancestors, the positions, and the links to children and siblings.

    Args:
        parent_list: for each group of `topk` candidates after the first, the candidate that they follow.
        selected_index: the candidate of each node but the root.
        seq_lens: number of tokens before each root.
        tree_mask: bool [requests, nodes, nodes] in any shape: who sees whom.
        positions: those of all nodes.
        retrieve_index: the row of each node.
        retrieve_next_token: the first child of each node; -1: none.
        retrieve_next_sibling: the next sibling of each node; -1: none.
        topk: number of candidates behind each.
        depth: of the tree, unused.
        draft_token_num: number of nodes.
        tree_mask_mode: unused; on a CPU the mask has the nodes alone.
    """
    masks = tree_mask.view(-1, draft_token_num, draft_token_num)
    masks[:] = False
    for request, length in enumerate(seq_lens.tolist()):
        candidates, groups = selected_index[request].tolist(), parent_list[request].tolist()
        nodes = {candidate: node for node, candidate in enumerate(candidates, 1)}
        # Like SGLang's kernel, a node whose parent was not selected, which has the same probability, is ignored.
        parents = [-1, *(nodes.get(groups[each // topk], -1) if each >= topk else 0 for each in candidates)]
        first = request * draft_token_num
        for node, parent in enumerate(parents):
            retrieve_index[request, node] = first + node
            masks[request, node, node] = True
            if parent >= 0:
                masks[request, node] |= masks[request, parent]
            positions[first + node] = length + int(masks[request, node].sum()) - 1
        for node in range(draft_token_num - 1, 0, -1):
            parent = parents[node]
            if parent < 0:
                continue
            retrieve_next_sibling[request, node] = retrieve_next_token[request, parent]
            retrieve_next_token[request, parent] = node


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy places of the KV cache, of which each layer has an address and the number of bytes of a place."""
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        copied = [ctypes.string_at(address + place * size, size) for place in src_loc.tolist()]
        for place, data in zip(tgt_loc.tolist(), copied, strict=True):
            ctypes.memmove(address + place * size, data, size)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Write the places in the KV cache of the accepted rows to the front."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk down each tree as long as a child has the token that the model chose."""
    for request, choices in enumerate(target_predict.tolist()):
        rows = retrive_index[request].tolist()
        children, siblings = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        tokens = candidates[request].tolist()
        path = [0]
        while True:
            child = children[path[-1]]
            while child != -1 and tokens[child] != choices[path[-1]]:
                child = siblings[child]
            if child == -1:
                break
            path.append(child)
        for depth, node in enumerate(path):
            accept_index[request, depth] = rows[node]
            predicts[rows[node]] = choices[node]
        accept_token_num[request] = len(path) - 1


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
