"""The server's command-line flags: spellings and help, in the groups that `logitship serve --help` shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag that sets a field of `ServerConfig`, which has its type and its default.

    Attributes:
        spellings: such as `--model-path`. The first is the field's name. SGLang's and vLLM's names are both taken.
        help: the text of `--help`, and the field's description in the OpenAPI document.
        metavar: the value's name in `--help`; None: the last word of the field's name.
    """

    spellings: tuple[str, ...]
    help: str
    metavar: str | None = None

    @property
    def field(self) -> str:
        """Name of the field of `ServerConfig`."""
        return _python_name(self.spellings[0])

    @property
    def python_names(self) -> tuple[str, ...]:
        """The spellings as keyword arguments."""
        return tuple(map(_python_name, self.spellings))


def _python_name(spelling: str) -> str:
    return spelling.removeprefix("--").replace("-", "_")


FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag(
            ("--model-path", "--model"), "a Hugging Face folder, a GGUF file, a hub name, or the default model's name"
        ),
        Flag(("--tokenizer-path", "--tokenizer"), "where the tokenizer is, if not with the model"),
        Flag(("--served-model-name",), "the name under which clients ask for the model"),
        Flag(("--dtype",), "type of the weights; auto: float32 on a CPU, the checkpoint's own elsewhere"),
        Flag(("--device",), "cpu, cuda, cuda:1, …; auto: a GPU if there is one"),
        Flag(("--model-impl",), "transformers: the model's own code; auto: faster layers where they are known"),
        Flag(("--chat-template",), "a file with a Jinja template, instead of the tokenizer's"),
        Flag(("--trust-remote-code",), "run code that comes with the model's folder"),
    ),
    "engine": (
        Flag(("--max-num-seqs", "--max-running-requests"), "sequences that decode together"),
        Flag(("--max-model-len", "--context-length"), "longest prompt and output together, in tokens"),
        Flag(("--max-queued-requests",), "requests that may wait; more are refused with 429"),
        Flag(("--chunked-prefill-size",), "most prompt tokens computed in one step beside the running sequences"),
        Flag(("--mem-fraction-static", "--gpu-memory-utilization"), "share of the free memory for keys and values"),
        Flag(
            ("--prefix-cache-bytes",),
            "bytes of it for what earlier requests began with, which is not computed again; 0: none (default: a tenth)",
        ),
        Flag(("--random-seed", "--seed"), "seeds the requests that bring no seed of their own"),
        Flag(
            ("--enable-deterministic-inference",), "the same bits whatever else runs: read docs/deterministic.md first"
        ),
        Flag(("--speculative-algorithm",), "NGRAM: check several tokens in a step where a text repeats itself"),
        Flag(("--speculative-num-draft-tokens",), "most tokens of a sequence that a step checks ahead"),
    ),
    "sampling": (
        Flag(("--max-logprobs",), "most log-probabilities that a request may ask for at each position"),
        Flag(("--logprobs-mode",), "before any edit (raw), or after all of them (processed), unless the request says"),
        Flag(
            ("--reasoning-config",),
            'start and end of the model\'s thinking, for budgets: {"reasoning_start_str": …, "reasoning_end_str": …}',
            metavar="JSON",
        ),
    ),
    "processors": (
        Flag(
            ("--enable-custom-logit-processor",), "run processors that come with requests: read docs/security.md first"
        ),
        Flag(
            ("--logits-processors",),
            "batch processors to install: module:Class, or JSON with qualname, args, kwargs",
            metavar="NAME",
        ),
        Flag(
            ("--logits-processor-pattern",), "callables that requests may name: a regular expression, matched in full"
        ),
        Flag(
            ("--allow-processor",),
            "a file with the digests of the only processors that may be shipped, one a line",
            metavar="FILE",
        ),
        Flag(
            ("--tree-decode-config", "--tree_decode_config"),
            "a file with a tree of tokens that every request follows; or in $TREE_DECODE_CONFIG",
            metavar="FILE",
        ),
        Flag(("--tree",), "trees of tokens that requests can ask for by name", metavar="NAME=FILE"),
        Flag(("--max-processor-size",), "longest processor string, in bytes"),
        Flag(("--processor-cache-entries",), "most shipped processors kept loaded, and most registered ones"),
        Flag(("--processor-cache-bytes",), "most bytes of shipped processors kept loaded, and of registered ones"),
    ),
    "isolation": (
        Flag(
            ("--processor-isolation",),
            "where shipped code runs; none: in the server's own process, with all its rights",
        ),
        Flag(("--max-sandboxes",), "most shipped processors kept loaded in sandboxes, each a process"),
        Flag(("--sandbox-memory",), "bytes that a sandbox may take, beyond what torch takes"),
        Flag(("--sandbox-cpu-time",), "seconds of CPU time that a sandbox may burn outside its calls"),
        Flag(("--sandbox-step-timeout",), "seconds that a call of a shipped processor may take"),
        Flag(("--sandbox-load-timeout",), "seconds that it may take to load one"),
    ),
    "HTTP": (
        Flag(("--host",), "address to listen on"),
        Flag(("--port",), "port to listen on; 0: any free one"),
        Flag(
            ("--api-key",),
            "bearer tokens, of which every request must carry one; or in $LOGITSHIP_API_KEY, with commas",
        ),
        Flag(
            ("--shipping-api-key",),
            "tokens that may ship processors, which the others then may not; or in $LOGITSHIP_SHIPPING_API_KEY",
        ),
        Flag(("--max-request-bytes",), "longest request body, in bytes"),
        Flag(("--disable-playground",), "do not serve the playground, the page at /"),
        Flag(("--shutdown-timeout",), "seconds that running requests get to finish after SIGTERM"),
        Flag(("--log-level",), "how much to log"),
        Flag(("--log-format",), "lines for people, or a JSON object a line"),
    ),
}
"""Flags by group."""

FLAG_OF_FIELD: dict[str, Flag] = {flag.field: flag for flags in FLAGS.values() for flag in flags}
