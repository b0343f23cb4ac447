"""A plugin of SGLang, with which its attention in torch verifies trees of draft tokens, and with overlap scheduling.

By itself, it cannot; and on a CPU, SGLang turns off overlap scheduling if it speculates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def load() -> None:
    """Wrap the attention of steps with prompts, which SGLang calls for draft tokens too."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    path = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"
    HookRegistry.register(path, forward_extend, HookType.AROUND)
    path = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
    HookRegistry.register(path, lambda disable, server_args: None, HookType.AROUND)


def forward_extend(
    extend: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let each node see the tokens before the tree, and its ancestors in it."""
    if not batch.forward_mode.is_target_verify():
        return extend(backend, q, k, v, layer, batch, *args, **kwargs)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    num_nodes = batch.spec_info.draft_token_num
    masks = batch.spec_info.custom_mask.view(-1, num_nodes, num_nodes)
    queries = q.view(-1, num_nodes, layer.tp_q_head_num, layer.qk_head_dim)
    places = batch.out_cache_loc.view(-1, num_nodes)
    rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    outputs = []
    for (row, length), query, place, mask in zip(rows, queries, places, masks, strict=True):
        seen = torch.cat((backend.req_to_token_pool.req_to_token[row, :length], place))
        attended = scaled_dot_product_attention(
            query.movedim(0, 1),
            keys[seen].movedim(0, 1),
            values[seen].movedim(0, 1),
            attn_mask=torch.cat((torch.ones(num_nodes, length, dtype=torch.bool), mask), dim=1),
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            scale=layer.scaling,
        )
        outputs.append(attended.movedim(0, 1).reshape(num_nodes, -1))
    return torch.cat(outputs)
