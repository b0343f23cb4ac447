"""The entry point's former place, which the metadata of editable installations may still name."""

from logitship_sglang import load as load
