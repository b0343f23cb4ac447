"""Logits processors written for vLLM, without any import of logitship."""
