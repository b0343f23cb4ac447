"""Grammars: compiled under limits, and followed along an output."""
