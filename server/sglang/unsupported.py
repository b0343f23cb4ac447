"""Configurations of SGLang in which processors would be unpickled, skipped, or called with a wrong history."""

from __future__ import annotations

import os
from typing import Any

_TRUE = ("true", "1", "yes", "y")
"""Values of an environment variable that set it, as in SGLang's `EnvBool`."""


def resolved_arguments(server_args: Any) -> Any:
    """Return a view of SGLang's arguments, with the values of those that it chooses or changes itself.

    Args:
        server_args: SGLang's `ServerArgs`, which keeps the operator's values.
    """
    from sglang.srt.arg_groups.overrides import resolving_view  # pyright: ignore[reportMissingImports]

    return resolving_view(server_args)


def check_configuration(arguments: Any) -> None:
    """Refuse to start a server that accepts processors and could not run them.

    Args:
        arguments: those of `resolved_arguments`.

    Raises:
        ValueError: names the argument.
    """
    reasons = {
        "--tokenizer-worker-num": (
            arguments.tokenizer_worker_num > 1,
            "SGLang loads no plugins in its HTTP workers, which would unpickle processors",
        ),
        "--use-ray": (
            arguments.use_ray,
            "SGLang loads no plugins in its Ray actors, which would unpickle processors",
        ),
        "--smg-grpc-mode": (arguments.smg_grpc_mode, "requests would reach the scheduler without being checked"),
        "--attn-cp-size": (
            arguments.attn_cp_size > 1,
            "several ranks would run the processors of a request, and could sample different tokens",
        ),
        "--pp-size": (
            arguments.pp_size > 1,
            "a request that fails in the last stage would continue in the others",
        ),
        "--disaggregation-mode": (
            arguments.disaggregation_mode != "null",
            "a processor would lose its state between the prefill and the decode server",
        ),
        "--dllm-algorithm": (arguments.dllm_algorithm is not None, "SGLang calls no processors for diffusion models"),
        "SGLANG_RUST_SERVER": (
            os.environ.get("SGLANG_RUST_SERVER", "").lower() in _TRUE,
            "requests would reach the scheduler without being checked",
        ),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise ValueError(f"logitship does not run custom logit processors with {name}: {reason}")


def skips_processors(arguments: Any) -> bool:
    """Return whether SGLang decodes speculatively in a way that processors cannot follow: not with NGRAM.

    Args:
        arguments: those of `resolved_arguments`.
    """
    return arguments.speculative_algorithm not in (None, "NGRAM")
