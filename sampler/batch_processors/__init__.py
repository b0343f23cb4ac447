"""Batch processors: vLLM's contract, and the processors that the operator installs."""
