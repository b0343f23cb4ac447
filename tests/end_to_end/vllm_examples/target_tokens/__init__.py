"""Logits processors written for vLLM, with vLLM's names alone."""
