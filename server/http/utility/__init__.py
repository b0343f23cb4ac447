"""Routes about tokens and for probes, which SGLang and vLLM have."""
