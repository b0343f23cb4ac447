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
        Flag(("--tokenizer-path", "--tokenizer"), "path of the tokenizer, if it is not in the model's folder"),
        Flag(("--served-model-name",), "the name under which clients ask for the model"),
        Flag(("--dtype",), "dtype of the weights; auto: float32 on a CPU, the checkpoint's dtype elsewhere"),
        Flag(("--device",), "cpu, cuda, cuda:1, …; auto: a GPU if there is one"),
        Flag(
            ("--model-impl",),
            "transformers: use the model's own code; auto: use faster layers for supported architectures",
        ),
        Flag(("--chat-template",), "file with a Jinja chat template that replaces the tokenizer's"),
        Flag(("--tool-call-parser",), "how the model writes tool calls; default: as its chat template says"),
        Flag(("--trust-remote-code",), "run Python code from the model's folder"),
    ),
    "engine": (
        Flag(("--max-num-seqs", "--max-running-requests"), "maximum number of sequences in the running batch"),
        Flag(("--max-model-len", "--context-length"), "maximum length of prompt plus output, in tokens"),
        Flag(("--max-queued-requests",), "maximum number of waiting requests; more are refused with 429"),
        Flag(
            ("--max-queued-bytes",),
            "maximum memory of request bodies that are received or wait, in bytes; of several API keys each gets half",
        ),
        Flag(
            ("--chunked-prefill-size",),
            "maximum number of prompt tokens computed in one step next to the running sequences",
        ),
        Flag(("--mem-fraction-static", "--gpu-memory-utilization"), "fraction of the free memory for the KV cache"),
        Flag(
            ("--prefix-cache-bytes",),
            "bytes of the KV cache that keep the prefixes of earlier requests; 0: no prefix cache (default: a tenth)",
        ),
        Flag(("--random-seed", "--seed"), "seed for requests without a seed of their own"),
        Flag(
            ("--enable-deterministic-inference",),
            "bitwise the same results in any batch composition: read docs/deterministic.md first",
        ),
        Flag(("--speculative-algorithm",), "NGRAM: speculative decoding by prompt lookup"),
        Flag(("--speculative-num-draft-tokens",), "maximum number of draft tokens per sequence and step"),
        Flag(
            ("--max-forced-run",),
            "maximum number of forced tokens per sequence and step, which are the only ones allowed; 0: none",
        ),
    ),
    "sampling": (
        Flag(
            ("--constrained-json-whitespace-pattern",),
            "regular expression for the white space between the parts of JSON, where the output is constrained to JSON",
        ),
        Flag(("--max-logprobs",), "maximum number of log-probabilities per position that a request may ask for"),
        Flag(
            ("--logprobs-mode",),
            "default of the request field: log-probabilities before (raw) or after (processed) all edits",
        ),
        Flag(
            ("--reasoning-config",),
            'start and end of the reasoning, for budgets: {"reasoning_start_str": …, "reasoning_end_str": …}',
            metavar="JSON",
        ),
    ),
    "processors": (
        Flag(
            ("--enable-custom-logit-processor",),
            "run processors that clients ship with requests: read docs/security.md first",
        ),
        Flag(
            ("--logits-processors",),
            "batch processors to install: module:Class, or JSON with qualname, args, kwargs",
            metavar="NAME",
        ),
        Flag(
            ("--logits-processor-pattern",),
            "regular expression for the callables that requests may name; must match the full name",
        ),
        Flag(
            ("--allow-processor",),
            "file with the digests of the only processors that may be shipped, one per line",
            metavar="FILE",
        ),
        Flag(
            ("--blocked-digests",),
            "file with the digests of shipped processors that may not run, one per line; read again when it changes",
            metavar="FILE",
        ),
        Flag(
            ("--tree-decode-config", "--tree_decode_config"),
            "file with a token tree that every request follows; or $TREE_DECODE_CONFIG",
            metavar="FILE",
        ),
        Flag(("--tree",), "token trees that requests can select by name", metavar="NAME=FILE"),
        Flag(
            ("--default-processor",),
            "processor of every request: an installed one with parameters in JSON, or @FILE with a class",
            metavar="NAME={…}",
        ),
        Flag(
            ("--watermark-key-file",),
            "file with the secret of the watermarks, without which requests for one are refused",
            metavar="FILE",
        ),
        Flag(("--max-processor-size",), "maximum size of a processor string, in bytes"),
        Flag(
            ("--processor-cache-entries",), "maximum number of shipped processors kept loaded, and of registered ones"
        ),
        Flag(
            ("--processor-cache-bytes",),
            "maximum total size of shipped processors kept loaded, and of registered ones, in bytes",
        ),
        Flag(("--max-artifact-size",), "maximum size of an artifact, in bytes: a tensor or array of shipped classes"),
        Flag(("--artifact-cache-bytes",), "maximum total size of the artifacts of all clients, in bytes"),
    ),
    "isolation": (
        Flag(
            ("--processor-isolation",),
            "where shipped code runs; none: in the server's own process, with all its privileges",
        ),
        Flag(("--max-sandboxes",), "maximum number of sandboxes; each is a process with one shipped processor"),
        Flag(("--sandbox-idle-timeout",), "seconds after which the sandbox of an unused processor is ended"),
        Flag(("--sandbox-memory",), "memory limit of a sandbox, in bytes, on top of what torch takes"),
        Flag(("--sandbox-cpu-time",), "CPU time that a sandbox may use outside its calls, in seconds"),
        Flag(
            ("--sandbox-step-timeout",),
            "CPU time that shipped processors of one API key may take in a step, in seconds",
        ),
        Flag(
            ("--sandbox-first-step-timeout",),
            "the same for the first call of a shipped processor in a new sandbox, in seconds",
        ),
        Flag(("--sandbox-load-timeout",), "CPU time for loading a shipped processor, in seconds"),
        Flag(
            ("--allow-anonymous-code",),
            "run code in sandboxes for clients without API keys, also from other machines",
        ),
        Flag(
            ("--processor-wait",),
            "how long a step waits for shipped processors while other requests run, as a part of its own time; inf: "
            "until they have ended",
        ),
        Flag(
            ("--tenant-step-share",),
            "share of the cores' time that one key's shipped processors may take while requests of other keys run",
        ),
    ),
    "HTTP": (
        Flag(("--host",), "address to listen on"),
        Flag(("--port",), "port to listen on; 0: any free one"),
        Flag(
            ("--allowed-host",),
            "further names of this server in URLs: NAME, *.NAME, or * for any; IP addresses are always allowed",
            metavar="NAME",
        ),
        Flag(
            ("--allowed-origin",),
            "origins whose web pages may use the server, such as https://app.example.org; *: any",
        ),
        Flag(
            ("--api-key",),
            "bearer tokens; every request must send one of them; or $LOGITSHIP_API_KEY, comma-separated",
        ),
        Flag(
            ("--shipping-api-key",),
            "the only bearer tokens that may ship processors; or $LOGITSHIP_SHIPPING_API_KEY, comma-separated",
        ),
        Flag(
            ("--metrics-api-key",),
            "the only bearer tokens that may read /metrics, and nothing else; or $LOGITSHIP_METRICS_API_KEY",
        ),
        Flag(
            ("--requests-per-minute",),
            "requests that an API key may send in any 60 seconds, or all clients without keys together; 0: any number",
        ),
        Flag(
            ("--processor-loads-per-minute",),
            "shipped processors, not loaded yet, that an API key may use in any 60 seconds; 0: any number",
        ),
        Flag(("--max-request-bytes",), "maximum size of a request body, in bytes"),
        Flag(
            ("--max-request-elements",),
            "maximum number of keys and values in a request body; "
            "a string counts as 2, a key, a list or an object as 4",
        ),
        Flag(
            ("--request-body-timeout",),
            "time limit for receiving a request body, and before it the headers, in seconds",
        ),
        Flag(("--disable-playground",), "do not serve the playground, the page at /"),
        Flag(("--shutdown-timeout",), "time that running requests get to finish after SIGTERM, in seconds"),
        Flag(("--log-level",), "log level"),
        Flag(("--log-format",), "text, or one JSON object per line"),
    ),
}
"""Flags by group."""

FLAG_OF_FIELD: dict[str, Flag] = {flag.field: flag for flags in FLAGS.values() for flag in flags}
