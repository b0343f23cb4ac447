"""The checks of `logitship check`, grouped by how they test a processor."""
