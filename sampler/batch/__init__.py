"""The persistent batch: rows, their order, and what changed since the last step."""
