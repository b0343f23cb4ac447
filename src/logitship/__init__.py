"""Send a logits processor with your request to an LLM server."""

__all__: list[str] = []
