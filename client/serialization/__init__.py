"""Serialization of processor classes to processor strings, and loading them."""
