"""Trees of tokens, and their file format."""
