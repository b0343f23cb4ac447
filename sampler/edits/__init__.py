"""Edits of logits: their log, their binary form, and how those of many calls are applied at once."""
