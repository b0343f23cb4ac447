"""Constrains an output to a grammar: a JSON schema, regular expression, EBNF, choice of texts, or structural tag."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from pydantic import model_validator

from logitship.builtin_processors.grammars import grammar_source as grammar_source
from logitship.builtin_processors.grammars.compiler import GrammarCompiler
from logitship.builtin_processors.grammars.cursor import GrammarCursor
from logitship.builtin_processors.grammars.explanations import explained
from logitship.builtin_processors.grammars.structural_tag import TokenNames, from_structural_tag
from logitship.builtin_processors.parts.marker import Marker
from logitship.sampler.allowed_tokens import AllowedTokens, Words
from logitship.sampler.device_tensor import copies_to

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams
from .thinking_token_budget import ReasoningMarkers

_log = logging.getLogger(__name__)

_MAX_SECONDS = 0.03
"""CPU time limit for a mask. llguidance limits most work per step, but not that on an ambiguous grammar such as
`root ::= root root | "a"`, which grows with the square of the text's length."""
_MAX_TOO_SLOW = 3
"""Masks of a sequence over that limit, with which it ends: a busy machine may delay one of any grammar."""
_SLOW_SECONDS = 0.002
"""CPU time of a mask that is not looked at ahead of its step. Most take 0.01 to 0.5 ms."""
_MAX_SLOW = 3
"""Slow masks of a sequence, after which none is looked at ahead: the first ones of a grammar may be slow."""
_MAX_BEGINNINGS = 32
"""Maximum words of a mask that are not zero, where the next text may be certain: one for each of its beginnings."""
_MAX_TOKENS_AHEAD = 16
"""Maximum tokens of a text that is looked for."""
_MAX_USUAL_TOKENS = 10_000
"""Maximum tokens of all texts of a choice that are generated as their usual tokens: more would take long to compile."""
MAX_GRAMMAR_LENGTH = 1 << 18
"""Maximum characters of a grammar. OpenAI's API allows about half of that for a JSON schema."""


class GrammarParams(ProcessorParams):
    """See `GrammarProcessor`.

    Exactly one of `json_schema`, `json_object`, `regex`, `ebnf`, `choice` and `structural_tag` is set.
    """

    json_schema: Annotated[
        dict[str, Any] | bool | str | None, Expects("a JSON schema, as an object or as JSON text")
    ] = None
    """A JSON schema (draft 2020-12 and older), as an object or as JSON text. true or {}: any JSON."""
    json_object: Annotated[Literal[True] | None, Expects("true")] = None
    """Any JSON object."""
    regex: Annotated[str | None, Expects("a regular expression")] = None
    """A regular expression that the whole output matches, in the syntax of Rust's `regex` crate."""
    ebnf: Annotated[str | None, Expects("a grammar, as text")] = None
    """A context-free grammar: EBNF as xgrammar and llama.cpp (GBNF) write it, with a rule `root ::= …`, or Lark as
    llguidance writes it, with a rule `start: …`."""
    choice: Annotated[list[str] | None, Expects("a list of strings")] = None
    """Texts, one of which is the output."""
    structural_tag: Annotated[
        dict[str, Any] | str | None, Expects("a structural tag, as an object or as JSON text")
    ] = None
    """Free text with tags whose contents are constrained, in xgrammar's words: `{"format": {…}}`, or the older
    `{"structures": […], "triggers": […]}`."""
    whitespace_pattern: Annotated[str | None, Expects("a regular expression")] = None
    """Regular expression for the white space between the parts of JSON. "": none. Default: the operator's."""
    after: Annotated[Marker | None, Expects("a text or a list of token ids")] = None
    """Marker after which the constrained text begins, such as `</think>`: a text, which is tokenized, or token ids.
    Until its tokens are sampled consecutively, all tokens are allowed. Default: the text begins at once, or after the
    thinking that the prompt has begun."""

    tokenization: Annotated[Literal["any", "usual"], Expects('"any" or "usual"')] = "any"
    """With `choice`. any: any tokens that form one of the texts. usual: only those into which the tokenizer divides it,
    so that each text is generated in one way; of texts with up to 10,000 tokens together, without special ones.
    Default: any; in a beam search, which would find texts twice, usual."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(CONSTRAINTS)}; got {' and '.join(given) or 'none'}")
        if self.whitespace_pattern is not None and given[0] not in WITH_JSON:
            raise ValueError(f"whitespace_pattern: goes with {', '.join(WITH_JSON)}, not with {given[0]}")
        if self.tokenization == "usual" and self.choice is None:
            raise ValueError(f"tokenization: goes with choice, not with {given[0]}")
        return self

    @property
    def constraint(self) -> str:
        """Name of the constraint that is set."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    def source(self, model: ModelFacts, json_whitespace: str | None = None) -> str:
        """Return the grammar in llguidance's syntax.

        Args:
            model: has the special tokens that a structural tag may name.
            json_whitespace: the `whitespace_pattern` of requests without one; None: any white space.

        Raises:
            ValueError: the constraint is malformed or too long.
        """
        given = getattr(self, self.constraint)
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        space = json_whitespace if self.whitespace_pattern is None else self.whitespace_pattern
        length = len(text) + len(self.whitespace_pattern or "")
        if length > MAX_GRAMMAR_LENGTH:
            raise ValueError(f"it has {length} characters, more than {MAX_GRAMMAR_LENGTH}")
        match self.constraint:
            case "regex":
                return grammar_source.from_regex(given)
            case "ebnf":
                return grammar_source.from_ebnf(given)
            case "choice":
                return grammar_source.from_choice(given)
            case "structural_tag":
                value = json.loads(given) if isinstance(given, str) else given
                return from_structural_tag(value, TokenNames.of(model), space)
        schema = {"type": "object"} if self.json_object else given
        return grammar_source.from_json_schema(schema, space)


CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
WITH_JSON = ("json_schema", "json_object", "structural_tag")
"""The constraints that `whitespace_pattern` goes with."""
_DESCRIPTIONS = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON",
    "regex": "the regular expression",
    "ebnf": "the grammar",
    "choice": "the choice",
    "structural_tag": "the structural tag",
}


@dataclass(frozen=True, eq=False)
class PreparedGrammar:
    """A compiled grammar, shared by a request's sequences.

    Attributes:
        key: identifies it in a sequence's state.
        matcher: a matcher at the beginning of the text, to be copied.
        after: the tokens after which the text begins; empty if it begins at once.
    """

    key: str
    matcher: LLMatcher
    after: tuple[int, ...]


class GrammarStats(NamedTuple):
    """The state and counters of a `GrammarProcessor`."""

    checks_running: int = 0
    """Grammars that are being checked or compiled."""
    checks_waiting: int = 0
    """Grammars that wait for a checker."""
    failures: int = 0
    """Masks that took too long or were too complex, which ends the sequence."""


class GrammarProcessor(BuiltinProcessor):
    """Allows the tokens that keep the output a prefix of the grammar's language.

    When the text is complete, the model's EOS tokens are allowed, and tokens that continue it, if any. If the output
    does not match, because something else forced a token, no token is allowed, and the request ends with an error. If
    the prompt ends within thinking, the text begins after the thinking, as in vLLM and SGLang.

    llguidance (https://github.com/guidance-ai/llguidance) computes the masks: an Earley parser with a lexer based on
    derivatives of regular expressions, on the CPU, some 0.01 to 1 ms per row.

    Args:
        reasoning: the model's thinking markers; None if unknown.
        json_whitespace: regular expression for the white space between the parts of JSON in requests without a
            `whitespace_pattern`; "" for none; None for any.
    """

    name = "grammar"
    Params = GrammarParams
    example: ClassVar[Mapping[str, Any]] = {"regex": "[a-c]*d?"}
    is_mask = True

    def __init__(self, reasoning: ReasoningMarkers | None = None, json_whitespace: str | None = None) -> None:
        self._reasoning = reasoning
        self._json_whitespace = json_whitespace
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._executor: LLExecutor | None = None
        self._was_slow = False
        self._num_failures = 0

    def stats(self) -> GrammarStats:
        """Return the current state and counters."""
        compiler = self._compiler
        if compiler is None:
            return GrammarStats()
        return GrammarStats(compiler.num_checks, compiler.num_waiting, self._num_failures)

    def params_in_beams(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `BuiltinProcessor.params_in_beams`."""
        return {"tokenization": "usual", **params} if params.get("choice") is not None else params

    def load_tokenizer(self, model: ModelFacts) -> None:
        """Create the tokenizer of llguidance, which blocks all threads for some tenths of a second, and its threads.

        Otherwise, the first use creates them.

        Raises:
            ValueError: llguidance does not support the model's tokenizer.
        """
        self._compiler_for(model)

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> PreparedGrammar:
        """Compile the grammar, or get it from the cache."""
        read = super().prepare(params, model)
        source, subject = "", _DESCRIPTIONS[read.constraint]
        try:
            compiler = self._compiler_for(model)  # first, because it refuses unsupported tokenizers
            source = read.source(model, self._json_whitespace)
            if read.whitespace_pattern:
                white_space, subject = grammar_source.from_regex(read.whitespace_pattern), "whitespace_pattern"
                compiler.compile(white_space)
                subject = _DESCRIPTIONS[read.constraint]
            if read.choice is not None and read.tokenization == "usual":
                texts = [compiler.usual_tokens(text) for text in dict.fromkeys(read.choice)]
                usual = [tokens for tokens in texts if tokens is not None]
                if len(usual) == len(texts) and sum(map(len, usual)) <= _MAX_USUAL_TOKENS:
                    source = grammar_source.from_tokens(usual)
            matcher = compiler.compile(source)
        except (ValueError, RecursionError) as error:
            reason = explained(error, source, is_generated=source.startswith(grammar_source.NO_FORCING))
            raise ValueError(f"{subject} cannot be used: {reason}") from None
        after = read.after or ()
        key = sha256(f"{after}{source}".encode()).hexdigest()
        return PreparedGrammar(f"grammar:{key}", matcher, after)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Mask each row by its grammar, in place, with one write for all rows."""
        cursors = [self._cursor(params) for params in custom_param_list or ()]
        if not all(cursor.is_free for cursor in cursors):
            mask_tokens(logits, self._masks(cursors))
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        pairs = []
        for params, each in zip(param_list, allowed, strict=True):
            cursor = self._cursor(params)
            if each.may_guess and cursor.num_slow >= _MAX_SLOW:
                each.leave_open()  # others would wait for all masks of its run in one step
            elif not cursor.is_free:
                pairs.append((cursor, each))
        if not pairs:
            return
        masks = self._masks([cursor for cursor, _ in pairs])
        ahead = [_Ahead(cursor, words) for (cursor, each), words in zip(pairs, masks, strict=True) if each.may_guess]
        likely = iter(self._likely_tokens(ahead))
        for (_, each), words in zip(pairs, masks, strict=True):
            tokens = next(likely) if each.may_guess else []
            if tokens:
                each.expect(tokens)
            else:
                each.keep_mask(words)

    def _likely_tokens(self, ahead: Sequence[_Ahead]) -> list[list[int]]:
        """Return the usual tokens of the text that must come next, for each row; none if there is no such text.

        The masks of all rows after the same number of tokens are computed at once. Those behind the longest tokens are
        needed later anyway, if these are the usual ones. llguidance's own `compute_ff_bytes` may take seconds.
        """
        assert self._compiler is not None
        going_on = ahead
        while going_on := [each for each in going_on if each.go_on(self._compiler)]:
            for each, words in zip(going_on, self._masks([each.cursor for each in going_on]), strict=True):
                each.words = words
        return [each.finish(self._compiler) for each in ahead]

    def _compiler_for(self, model: ModelFacts) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._executor = LLExecutor()
                self._compiler = GrammarCompiler(model)
            return self._compiler

    def _cursor(self, params: dict[str, Any]) -> GrammarCursor:
        """Return the row's cursor, advanced to the end of its output."""
        prepared: PreparedGrammar = self.prepared(params)
        request = params["__req__"]
        cursor: GrammarCursor | None = request.state.get(prepared.key)
        if cursor is None:
            after = [prepared.after] if prepared.after else self._ends_of_thinking(request.origin_input_ids)
            cursor = GrammarCursor(prepared.matcher, frozenset(request.eos_token_ids), after)
            request.state[prepared.key] = cursor
        cursor.follow(request.output_ids)
        return cursor

    def _ends_of_thinking(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the end markers of the thinking that a prompt has begun; empty if it has not."""
        if self._reasoning is None or self._reasoning.opened_in(prompt) is None:
            return []
        return [self._reasoning.end.token_ids, self._reasoning.natural_end.token_ids]

    def _masks(self, cursors: Sequence[GrammarCursor]) -> Words:
        """Return the masks, int32 [rows, words]. Masks not cached from the last step are computed in parallel."""
        assert self._compiler is not None
        words = np.full((len(cursors), self._compiler.mask_words), -1, dtype=np.int32)
        new = []
        for row, cursor in enumerate(cursors):
            if cursor.is_refused:
                words[row] = 0
            elif cursor.mask is not None:
                words[row] = cursor.mask
            elif not cursor.is_free:
                new.append(row)
        # Without new masks, nothing is learned of their speed.
        seconds = self._fill(words, [(cursors[row].matcher, row) for row in new]) if new else {}
        for row in new:
            cursors[row].num_slow += row in seconds and seconds[row] > _SLOW_SECONDS
            cursors[row].num_too_slow += row in seconds and seconds[row] > _MAX_SECONDS
            is_too_slow = cursors[row].num_too_slow >= _MAX_TOO_SLOW
            # Otherwise llguidance would end the text here, which would then not match its grammar.
            if cursors[row].matcher.is_error() or is_too_slow:
                reason = "its masks take too long" if is_too_slow else cursors[row].matcher.get_error()
                _log.warning("a grammar became too complex to continue: %s", reason)
                words[row] = 0
                self._num_failures += 1
            cursors[row].mask = words[row]
        return words

    def _fill(self, words: Words, matchers: list[tuple[LLMatcher, int]]) -> dict[int, float]:
        """Compute masks.

        Returns:
            The CPU seconds of the masks by row, if they were measured.
        """
        if len(matchers) > 1 and not self._was_slow:
            assert self._executor is not None
            began = time.perf_counter()
            fill_next_token_bitmask_par(self._executor, matchers, words)
            # A slow row cannot be identified here. The next call computes the masks one by one.
            self._was_slow = time.perf_counter() - began > min(_MAX_SECONDS, len(matchers) * _SLOW_SECONDS)
            return {}
        self._was_slow = self._was_slow and len(matchers) == 1  # one row tells nothing about the others
        seconds = {}
        for matcher, row in matchers:
            began = time.thread_time()
            fill_next_token_bitmask(matcher, words, row)
            seconds[row] = time.thread_time() - began
        return seconds


class _Ahead:
    """Looks ahead in a sequence's grammar, as long as it seems to leave only one text.

    If it does, each allowed token is a beginning of the longest one.

    Args:
        cursor: the sequence's, which reads the tokens ahead until `finish`.
        words: its mask.
    """

    def __init__(self, cursor: GrammarCursor, words: Words) -> None:
        self.cursor = cursor
        self.words = words
        self._text = b""
        self._num_tokens = 0

    def go_on(self, compiler: GrammarCompiler) -> bool:
        """Read the longest allowed token, and return whether the mask after it is worth computing."""
        longest = compiler.longest_token(_tokens_of(self.words))
        if longest is None:
            return False
        self._text += longest.text
        self._num_tokens += 1
        self.cursor.read(longest.token_id)
        return not self.cursor.is_refused and self._num_tokens < _MAX_TOKENS_AHEAD and self.cursor.num_slow < _MAX_SLOW

    def finish(self, compiler: GrammarCompiler) -> list[int]:
        """Remove the tokens from the cursor, and return the usual tokens of their text."""
        self.cursor.remove(self._num_tokens)
        return compiler.tokens_of_beginning(self._text) if self._text else []


def _tokens_of(words: Words) -> list[int]:
    """Return the tokens of a mask, ascending; none if they are too many to be the beginnings of one text."""
    used = words.nonzero()[0]
    if not 0 < len(used) <= _MAX_BEGINNINGS:
        return []
    bits = np.unpackbits(words[used].astype("<i4", copy=False).view(np.uint8), bitorder="little").nonzero()[0]
    tokens: list[int] = (used[bits >> 5] * 32 + (bits & 31)).tolist()
    return tokens


def mask_tokens(logits: torch.Tensor, words: Words) -> None:
    """Set the logits of all tokens but the allowed ones to -inf, in place. Does not synchronize with the device.

    Args:
        logits: float32 [rows, vocab].
        words: int32 [rows, at least vocab / 32]; see `Words`.
    """
    device = logits.device
    octets = words.astype("<i4", copy=False).view(np.uint8)
    if device.type == "cpu":  # NumPy is twice as fast as the lines below
        forbidden = np.unpackbits(~octets, axis=1, bitorder="little", count=logits.shape[1])
        logits.masked_fill_(torch.from_numpy(forbidden).view(torch.bool), -torch.inf)
        return
    packed = copies_to(device)(octets)
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
