"""Tokenizer and health-check routes, as in SGLang and vLLM."""
