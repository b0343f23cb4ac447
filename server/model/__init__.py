"""The model: loading, forward passes, and the KV cache."""
