"""Registry of installed processors, which requests use by name, without shipping code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor import CustomLogitProcessor

from .any_model_thinking_budget import TokenizerThinkingBudgetLogitProcessor
from .base import BuiltinProcessor
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
from .temperature_rules import DynamicTemperatureLogitsProcessor, QuadraticLogitsProcessor
from .think_mode import StrictThinkModeLogitsProcessor, ThinkModeLogitsProcessor
from .thinking_budget import (
    DeepSeekR1ThinkingBudgetLogitProcessor,
    Glm4MoeThinkingBudgetLogitProcessor,
    InklingThinkingBudgetLogitProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
)
from .tree import TreeLogitsProcessor
from .trigger_phrase import TriggerPhraseLogitsProcessor
from .truncation_rules import PLessLogitsProcessor, TopNSigmaLogitsProcessor
from .watermark_kgw import WatermarkKgwLogitsProcessor
from .watermark_synthid import WatermarkSynthidLogitsProcessor
from .watermarks.watermark_key import WatermarkKey
from .xtc import XTCLogitsProcessor

BUILTIN_PROCESSORS: tuple[type[BuiltinProcessor], ...] = (
    CiteFromPromptLogitsProcessor,
    DRYLogitsProcessor,
    DeepSeekR1ThinkingBudgetLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    DynamicTemperatureLogitsProcessor,
    EntropyStopLogitsProcessor,
    ForceLastPhraseLogitsProcessor,
    GenLengthLogitsProcessor,
    Glm4MoeThinkingBudgetLogitProcessor,
    GrammarProcessor,
    InklingThinkingBudgetLogitProcessor,
    MaxTimeLogitsProcessor,
    MinKLogitsProcessor,
    Mirostat2LogitsProcessor,
    MultiSequenceLogitsProcessor,
    MultipleChoiceLogitsProcessor,
    PLessLogitsProcessor,
    PreventHallucinationLogitsProcessor,
    QuadraticLogitsProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
    StrictThinkModeLogitsProcessor,
    TailFreeLogitsProcessor,
    ThinkModeLogitsProcessor,
    TokenizerThinkingBudgetLogitProcessor,
    TopHLogitsProcessor,
    TopNSigmaLogitsProcessor,
    TreeLogitsProcessor,
    TriggerPhraseLogitsProcessor,
    TypicalPLogitsProcessor,
    XTCLogitsProcessor,
    WatermarkKgwLogitsProcessor,
    WatermarkSynthidLogitsProcessor,
)


class Registry:
    """Installed processors by name. Iterates over the names, sorted."""

    def __init__(self, processors: Iterable[type[BuiltinProcessor]] = ()) -> None:
        self._by_name: dict[str, type[CustomLogitProcessor]] = {}
        self._makers: dict[str, Callable[[], CustomLogitProcessor]] = {}
        for processor in processors:
            self.add(processor.name, processor)

    def add(
        self,
        name: str,
        processor: type[CustomLogitProcessor],
        make: Callable[[], CustomLogitProcessor] | None = None,
    ) -> None:
        """Install `processor` under `name`.

        Args:
            name: the name for requests.
            processor: the class.
            make: creates an instance; by default, the class is called without arguments.

        Raises:
            ValueError: another processor has that name.
        """
        holder = self._by_name.setdefault(name, processor)
        if holder is not processor:
            raise ValueError(f"cannot install {processor.__name__} as {name!r}: {holder.__name__} has that name")
        self._makers[name] = make or processor

    def make(self, name: str) -> CustomLogitProcessor:
        """Create an instance of the processor installed under `name`.

        Raises:
            ProcessorLoadError: no processor has that name.
        """
        self.get(name)
        return self._makers[name]()

    def get(self, name: str) -> type[CustomLogitProcessor]:
        """Return the processor installed under `name`.

        Raises:
            ProcessorLoadError: no processor has that name; the message lists the names.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise ProcessorLoadError(
                f"no processor is installed as {name[:80]!r}; installed are: {', '.join(self) or 'none'}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._by_name))

    def __len__(self) -> int:
        return len(self._by_name)


def installed_processors(watermark_key: WatermarkKey | None = None) -> Registry:
    """Return a new registry of the built-in processors.

    Args:
        watermark_key: the key of the watermarks; None: requests for them are refused.
    """
    registry = Registry(BUILTIN_PROCESSORS)
    add_watermarks(registry, watermark_key)
    return registry


def add_watermarks(registry: Registry, key: WatermarkKey | None) -> None:
    """Let the watermarks of a registry mark with a key."""
    registry.add(
        WatermarkKgwLogitsProcessor.name, WatermarkKgwLogitsProcessor, partial(WatermarkKgwLogitsProcessor, key)
    )
    registry.add(
        WatermarkSynthidLogitsProcessor.name,
        WatermarkSynthidLogitsProcessor,
        partial(WatermarkSynthidLogitsProcessor, key),
    )
