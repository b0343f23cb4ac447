"""Speculative decoding: drafts, and whether they pay off."""
