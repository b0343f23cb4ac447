"""vLLM's names, for plugins that import them although vLLM is not installed."""

from .import_hook import enable_vllm_names

__all__ = ["enable_vllm_names"]
