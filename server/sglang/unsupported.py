"""Configurations of SGLang in which processors would be unpickled, skipped, or called with a wrong history."""

from __future__ import annotations

import os
from typing import Any


def check_configuration(server_args: Any) -> None:
    """Refuse to start a server that accepts processors and could not run them.

    Args:
        server_args: SGLang's `ServerArgs`.

    Raises:
        ValueError: names the argument.
    """
    reasons = {
        "--tokenizer-worker-num": (
            server_args.tokenizer_worker_num > 1,
            "SGLang loads no plugins in its HTTP workers, which would unpickle processors",
        ),
        "--pp-size": (
            server_args.pp_size > 1,
            "a request that fails in the last stage would go on in the others",
        ),
        "--disaggregation-mode": (
            server_args.disaggregation_mode != "null",
            "a processor would lose its state between the prefill and the decode server",
        ),
        "--dllm-algorithm": (server_args.dllm_algorithm is not None, "SGLang calls no processors for diffusion models"),
        "SGLANG_RUST_SERVER": (
            os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true"),
            "requests would reach the scheduler without being checked",
        ),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise ValueError(f"logitship does not run custom logit processors with {name}: {reason}")


def skips_processors(server_args: Any) -> bool:
    """Return whether SGLang decodes speculatively in a way that processors cannot follow.

    NGRAM drafts can be followed, except with overlap scheduling, where a step begins before the verdict about the last
    drafts is known. On a CPU, SGLang turns that off by itself.

    Args:
        server_args: SGLang's `ServerArgs`.
    """
    algorithm = server_args.speculative_algorithm
    if algorithm is None:
        return False
    return algorithm != "NGRAM" or not (server_args.disable_overlap_schedule or server_args.device == "cpu")
