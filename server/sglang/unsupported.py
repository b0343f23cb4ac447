"""Configurations of SGLang in which processors would be unpickled, skipped, or called with a wrong history."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_TRUE = ("true", "1", "yes", "y")
"""Values of an environment variable that set it, as in SGLang's `EnvBool`."""
_FOLLOWED = ("NGRAM", "EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms whose draft tokens SGLang verifies with `eagle_sample`; NEXTN is EAGLE."""


def resolved_arguments(server_args: Any) -> Any:
    """Return a view of SGLang's arguments, with the values of those that it chooses or changes itself.

    Args:
        server_args: SGLang's `ServerArgs`, which keeps the operator's values.
    """
    from sglang.srt.arg_groups.overrides import resolving_view  # pyright: ignore[reportMissingImports]

    return resolving_view(server_args)


def _is_many(value: int) -> bool:
    return value > 1


UNSUPPORTED: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "--tokenizer-worker-num": (
        "tokenizer_worker_num",
        _is_many,
        "SGLang loads no plugins in its HTTP workers, which would unpickle processors",
    ),
    "--use-ray": ("use_ray", bool, "SGLang loads no plugins in its Ray actors, which would unpickle processors"),
    "--smg-grpc-mode": ("smg_grpc_mode", bool, "requests would reach the scheduler without being checked"),
    "--attn-cp-size": (
        "attn_cp_size",
        _is_many,
        "several ranks would run the processors of a request, and could sample different tokens",
    ),
    "--pp-size": ("pp_size", _is_many, "a request that fails in the last stage would continue in the others"),
    "--disaggregation-mode": (
        "disaggregation_mode",
        lambda mode: mode != "null",
        "a processor would lose its state between the prefill and the decode server",
    ),
    "--dllm-algorithm": (
        "dllm_algorithm",
        lambda algorithm: algorithm is not None,
        "SGLang calls no processors for diffusion models",
    ),
}
"""By flag: SGLang's argument, whether a value cannot be supported, and why."""


def check_configuration(arguments: Any) -> None:
    """Refuse to start a server that accepts processors and could not run them.

    Args:
        arguments: those of `resolved_arguments`.

    Raises:
        ValueError: names the argument.
    """
    reasons = {
        flag: reason for flag, (name, refuses, reason) in UNSUPPORTED.items() if refuses(getattr(arguments, name))
    }
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in _TRUE:
        reasons["SGLANG_RUST_SERVER"] = "requests would reach the scheduler without being checked"
    for flag, reason in reasons.items():
        raise ValueError(f"logitship does not run custom logit processors with {flag}: {reason}")


def skips_processors(arguments: Any) -> bool:
    """Return whether SGLang decodes speculatively in a way that processors cannot follow.

    Args:
        arguments: those of `resolved_arguments`.
    """
    return arguments.speculative_algorithm not in (None, *_FOLLOWED)
