"""Logits that do not exist yet: a tensor whose edits are recorded, and whose values are waited for."""
