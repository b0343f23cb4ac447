"""The processors that come with logitship."""

from .disallowed_tokens import DisallowedTokensLogitsProcessor
from .no_repeat_ngram import DeepseekOCRNoRepeatNGramLogitProcessor
from .registry import Registry, installed_processors
from .sglang_names import SGLANG_NAMES, installed_by_reference
from .thinking_budget import (
    DeepSeekR1ThinkingBudgetLogitProcessor,
    Glm4MoeThinkingBudgetLogitProcessor,
    InklingThinkingBudgetLogitProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
    ThinkingBudgetLogitProcessor,
)

__all__ = [
    "SGLANG_NAMES",
    "DeepSeekR1ThinkingBudgetLogitProcessor",
    "DeepseekOCRNoRepeatNGramLogitProcessor",
    "DisallowedTokensLogitsProcessor",
    "Glm4MoeThinkingBudgetLogitProcessor",
    "InklingThinkingBudgetLogitProcessor",
    "Qwen3ThinkingBudgetLogitProcessor",
    "Registry",
    "ThinkingBudgetLogitProcessor",
    "installed_by_reference",
    "installed_processors",
]
