"""The processors that come with logitship."""

from .any_model_thinking_budget import TokenizerThinkingBudgetLogitProcessor
from .cite_from_prompt import CiteFromPromptLogitsProcessor
from .disallowed_tokens import DisallowedTokensLogitsProcessor
from .force_last_phrase import ForceLastPhraseLogitsProcessor
from .gen_length import GenLengthLogitsProcessor
from .grammar import GrammarProcessor
from .max_time import MaxTimeLogitsProcessor
from .multi_sequence import MultiSequenceLogitsProcessor
from .multiple_choice import MultipleChoiceLogitsProcessor
from .no_repeat_ngram import DeepseekOCRNoRepeatNGramLogitProcessor
from .prevent_hallucination import PreventHallucinationLogitsProcessor
from .registry import Registry, installed_processors
from .sglang_names import INSTALLED_BY_REFERENCE, SGLANG_NAMES
from .think_mode import StrictThinkModeLogitsProcessor, ThinkModeLogitsProcessor
from .thinking_budget import (
    DeepSeekR1ThinkingBudgetLogitProcessor,
    Glm4MoeThinkingBudgetLogitProcessor,
    InklingThinkingBudgetLogitProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
    ThinkingBudgetLogitProcessor,
)
from .tree import TreeLogitsProcessor
from .trigger_phrase import TriggerPhraseLogitsProcessor
from .watermark_detector import WatermarkEvidence, detect_watermark
from .watermark_kgw import WatermarkKgwLogitsProcessor
from .watermark_synthid import WatermarkSynthidLogitsProcessor
from .watermarks.watermark_key import WatermarkKey

__all__ = [
    "INSTALLED_BY_REFERENCE",
    "SGLANG_NAMES",
    "CiteFromPromptLogitsProcessor",
    "DeepSeekR1ThinkingBudgetLogitProcessor",
    "DeepseekOCRNoRepeatNGramLogitProcessor",
    "DisallowedTokensLogitsProcessor",
    "ForceLastPhraseLogitsProcessor",
    "GenLengthLogitsProcessor",
    "Glm4MoeThinkingBudgetLogitProcessor",
    "GrammarProcessor",
    "InklingThinkingBudgetLogitProcessor",
    "MaxTimeLogitsProcessor",
    "MultiSequenceLogitsProcessor",
    "MultipleChoiceLogitsProcessor",
    "PreventHallucinationLogitsProcessor",
    "Qwen3ThinkingBudgetLogitProcessor",
    "Registry",
    "StrictThinkModeLogitsProcessor",
    "ThinkModeLogitsProcessor",
    "ThinkingBudgetLogitProcessor",
    "TokenizerThinkingBudgetLogitProcessor",
    "TreeLogitsProcessor",
    "TriggerPhraseLogitsProcessor",
    "WatermarkEvidence",
    "WatermarkKey",
    "WatermarkKgwLogitsProcessor",
    "WatermarkSynthidLogitsProcessor",
    "detect_watermark",
    "installed_processors",
]
