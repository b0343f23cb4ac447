"""logitship inside SGLang: a plugin that SGLang loads through its entry-point group `sglang.srt.plugins`.

Groups, sandboxes and built-in processors are those of logitship's own server; SGLang runs the model. docs/sglang.md
describes it.
"""
