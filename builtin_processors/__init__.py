"""The processors that come with logitship."""

from .any_model_thinking_budget import TokenizerThinkingBudgetLogitProcessor
from .cite_from_prompt import CiteFromPromptLogitsProcessor
from .disallowed_tokens import DisallowedTokensLogitsProcessor
from .dry import DRYLogitsProcessor
from .entropy_stop import EntropyStopLogitsProcessor
from .force_last_phrase import ForceLastPhraseLogitsProcessor
from .gen_length import GenLengthLogitsProcessor
from .grammar import GrammarProcessor
from .max_time import MaxTimeLogitsProcessor
from .mirostat import Mirostat2LogitsProcessor
from .multi_sequence import MultiSequenceLogitsProcessor
from .multiple_choice import MultipleChoiceLogitsProcessor
from .no_repeat_ngram import DeepseekOCRNoRepeatNGramLogitProcessor
from .prevent_hallucination import PreventHallucinationLogitsProcessor
from .ranked_rules import (
    MinKLogitsProcessor,
    TailFreeLogitsProcessor,
    TopHLogitsProcessor,
    TypicalPLogitsProcessor,
)
from .registry import Registry, installed_processors
from .sglang_names import INSTALLED_BY_REFERENCE, SGLANG_NAMES
from .temperature_rules import DynamicTemperatureLogitsProcessor, QuadraticLogitsProcessor
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
from .truncation_rules import PLessLogitsProcessor, TopNSigmaLogitsProcessor
from .watermark_detector import WatermarkEvidence, detect_watermark
from .watermark_kgw import WatermarkKgwLogitsProcessor
from .watermark_synthid import WatermarkSynthidLogitsProcessor
from .watermarks.watermark_key import WatermarkKey
from .xtc import XTCLogitsProcessor

__all__ = [
    "INSTALLED_BY_REFERENCE",
    "SGLANG_NAMES",
    "CiteFromPromptLogitsProcessor",
    "DRYLogitsProcessor",
    "DeepSeekR1ThinkingBudgetLogitProcessor",
    "DeepseekOCRNoRepeatNGramLogitProcessor",
    "DisallowedTokensLogitsProcessor",
    "DynamicTemperatureLogitsProcessor",
    "EntropyStopLogitsProcessor",
    "ForceLastPhraseLogitsProcessor",
    "GenLengthLogitsProcessor",
    "Glm4MoeThinkingBudgetLogitProcessor",
    "GrammarProcessor",
    "InklingThinkingBudgetLogitProcessor",
    "MaxTimeLogitsProcessor",
    "MinKLogitsProcessor",
    "Mirostat2LogitsProcessor",
    "MultiSequenceLogitsProcessor",
    "MultipleChoiceLogitsProcessor",
    "PLessLogitsProcessor",
    "PreventHallucinationLogitsProcessor",
    "QuadraticLogitsProcessor",
    "Qwen3ThinkingBudgetLogitProcessor",
    "Registry",
    "StrictThinkModeLogitsProcessor",
    "TailFreeLogitsProcessor",
    "ThinkModeLogitsProcessor",
    "ThinkingBudgetLogitProcessor",
    "TokenizerThinkingBudgetLogitProcessor",
    "TopHLogitsProcessor",
    "TopNSigmaLogitsProcessor",
    "TreeLogitsProcessor",
    "TriggerPhraseLogitsProcessor",
    "TypicalPLogitsProcessor",
    "WatermarkEvidence",
    "WatermarkKey",
    "WatermarkKgwLogitsProcessor",
    "WatermarkSynthidLogitsProcessor",
    "XTCLogitsProcessor",
    "detect_watermark",
    "installed_processors",
]
