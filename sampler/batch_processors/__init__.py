"""Batch processors: vLLM's contract."""
