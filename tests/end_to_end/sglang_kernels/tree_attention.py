"""A plugin of SGLang, with which its attention in torch makes and verifies trees of draft tokens, and with overlap.

By itself, it can neither; and on a CPU, SGLang turns off overlap scheduling if it speculates.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def load() -> None:
    """Wrap the attention of steps with prompts, which SGLang calls for draft tokens too, and that of draft models."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    drafts = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    for path, hook in (
        ("sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend", forward_extend),
        (f"{drafts}.create_decode_backend", lambda create, factory: DraftSteps(factory)),
        (f"{drafts}.create_draft_extend_backend", lambda create, factory: attention(factory)),
        ("sglang.srt.managers.overlap_utils.gather_spec_extras", gather_rows),
    ):
        HookRegistry.register(path, hook, HookType.AROUND)
    if os.environ.get("LOGITSHIP_TEST_OVERLAP"):
        path = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
        HookRegistry.register(path, lambda disable, server_args: None, HookType.AROUND)


def gather_rows(gather: Any, indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return some rows of each buffer; SGLang's function is a kernel in Triton."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def attention(factory: Any, step: int | None = None) -> Any:
    """Return the attention in torch of a draft model.

    Args:
        factory: SGLang's `DraftBackendFactory`.
        step: of a draft; None: it reads the accepted tokens.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend = TorchNativeAttnBackend(factory.draft_model_runner)
    if step is not None:
        backend.forward_decode = partial(decode_draft, backend, step, factory.speculative_num_steps)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend


class DraftSteps:
    """The attention of each step of a draft."""

    def __init__(self, factory: Any) -> None:
        self.attn_backends = [attention(factory, step) for step in range(factory.speculative_num_steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        """Do nothing: the steps read the batch."""


def decode_draft(
    backend: Any, step: int, num_steps: int, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let each draft token see the tokens before the draft, and those of its branch."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    topk = len(q) // len(batch.req_pool_indices)
    outputs = []
    for index, query in enumerate(q.view(-1, layer.tp_q_head_num, 1, layer.qk_head_dim)):
        request, branch = divmod(index, topk)
        row = backend.req_to_token_pool.req_to_token[batch.req_pool_indices[request]]
        length = int(batch.seq_lens[request])
        start = length + branch * num_steps
        seen = torch.cat((row[:length], row[start : start + step + 1]))
        attended = scaled_dot_product_attention(
            query,
            keys[seen].movedim(0, 1),
            values[seen].movedim(0, 1),
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            scale=layer.scaling,
        )
        outputs.append(attended.reshape(-1))
    return torch.stack(outputs)


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
