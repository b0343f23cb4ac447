"""Runs shipped processors in processes that the kernel locks down."""
