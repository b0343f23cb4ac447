"""Sandboxes for shipped processors: worker processes that the kernel confines."""
