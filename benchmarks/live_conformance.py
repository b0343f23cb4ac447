"""Tokens of the same 200 requests, on SGLang, SGLang with the plugin, logitship, and vLLM with the plugin.

    tests/peers/sglang_cpu.sh SGLANG "$(command -v python)" && tests/peers/vllm_cpu.sh VLLM
    python benchmarks/live_conformance.py --sglang-python SGLANG/bin/python --vllm-python VLLM/bin/python

All answers are compared with those of SGLang without the plugin, which unpickles the processors. Where greedy answers
differ, logitship computes the log-probabilities of both tokens after the same tokens before: a difference is a near-tie
if these are so close that the order in which float32 numbers are added decides. The exit status is 1 if an answer
differs for another reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from plugin_servers import ROOT, add_distribution, sglang_with_plugin, vllm_with_plugin
from served import COMMAND, Server, listening
from transformers import AutoTokenizer

from logitship.client.serialization.processor_string import PYTHON
from logitship.server.model.default_model import default_model_folder

STRINGS: dict[str, str] = json.loads((ROOT / "tests" / "data" / "sglang_strings.json").read_text())["strings"][PYTHON]
"""Processor strings that SGLang's own `to_str` made."""

SIDES = ("SGLang", "SGLang with the plugin", "logitship", "vLLM with the plugin")
OF_SGLANG = frozenset(SIDES[:2])
NUM_TOKENS = 24
AT_A_TIME = 8
NEAR_TIE = 1e-3
"""Largest difference of log-probabilities that is put down to rounding.

Logits of about 20 have 2e-6 between neighbours in float32; sums of 600 products in 30 layers, added in another order,
differ by a hundred times that.
"""

SUBJECTS = (
    "The moon",
    "My grandmother",
    "A good teacher",
    "The old bridge",
    "Every winter",
    "This machine",
    "Our river",
)
VERBS = ("is", "was never", "knows why", "began to", "should not", "reminds me of")
PROMPTS = [f"{subject} {verb}" for subject in SUBJECTS for verb in VERBS]
REPETITIVE = "one two three one two three one two three one two"


@dataclass(frozen=True)
class Request:
    """A request, whichever server it goes to.

    Attributes:
        kind: its row in the table.
        prompt: text.
        processor: the name of a string of `STRINGS`; None: no processor.
        params: its parameters.
        temperature: 0: greedy.
        seed: of the sampler.
        sides: servers whose answers can be compared.
    """

    kind: str
    prompt: str
    processor: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    seed: int = 0
    sides: frozenset[str] = frozenset(SIDES)


def requests() -> Iterator[Request]:
    """Yield the 200 requests, those that are sampled first.

    SGLang samples with one generator for all requests. So these answers depend on the requests before, and are compared
    only between both SGLangs, but where the processor leaves no choice.
    """
    for number, prompt in enumerate(PROMPTS[:20]):
        sampled: Any = {"temperature": 0.8, "seed": number}
        yield Request("seeded", prompt, **sampled, sides=OF_SGLANG)
        forbidden = {"token_ids": list(range(number, 20_000, 7))}
        yield Request(
            "seeded, tokens forbidden", prompt, "DisallowedTokensLogitsProcessor", forbidden, **sampled, sides=OF_SGLANG
        )
        yield Request("seeded, one token forced", prompt, "ForceToken", {"token_id": 1000 + number}, **sampled)
    for prompt in PROMPTS[:40]:
        yield Request("greedy", prompt)
    # SGLang's class ends the server if two requests of a batch forbid different tokens.
    forbidden = {"token_ids": list(range(0, 49_000, 11))}
    for number, prompt in enumerate(PROMPTS[:30]):
        yield Request("greedy, tokens forbidden", prompt, "DisallowedTokensLogitsProcessor", forbidden)
        yield Request("greedy, one token preferred", prompt, "Boost", {"token_id": 260 + 10 * number})
    for number, prompt in enumerate(PROMPTS[:20]):
        params = {"ngram_size": 2 + number % 3, "window_size": 40 + number}
        yield Request(
            "greedy, no n-gram repeated", REPETITIVE + " " + prompt, "DeepseekOCRNoRepeatNGramLogitProcessor", params
        )
        # Longer than 16 tokens: the counts begin there, and vLLM's plugin ends a request at its fault token, 16.
        yield Request("greedy, tokens counted", f"{REPETITIVE} {REPETITIVE} {prompt}", "Countdown")


class Side:
    """A server that answers. It is paused while it is not asked, because SGLang's scheduler computes while it waits.

    Args:
        name: one of `SIDES`.
        server: answers; paused once this exists.
        tokenizer: of the model.
    """

    def __init__(self, name: str, server: Server, tokenizer: Callable[[str], Any]) -> None:
        self.name = name
        self._server = server
        self._tokenizer = tokenizer
        self._model = json.loads(server.get("/v1/models"))["data"][0]["id"]

    def answers(self, asked: Sequence[Request]) -> list[list[int]]:
        """Return the tokens of each answer; those that are sampled are asked for one at a time."""
        with self._server.resumed(), ThreadPoolExecutor(AT_A_TIME) as pool:
            sampled = [self._answer(each) for each in asked if each.temperature]
            return sampled + list(pool.map(self._answer, [each for each in asked if not each.temperature]))

    def _answer(self, request: Request) -> list[int]:
        prompt = self.prompt_ids(request)
        if self.name.startswith("vLLM"):
            (choice,) = self._post("/v1/completions", self._vllm_body(request, prompt))["choices"]
            token_ids: list[int] = choice["token_ids"]
            return token_ids
        ids: list[int] = self._post("/generate", sglang_body(request, prompt))["output_ids"]
        return ids

    def prompt_ids(self, request: Request) -> list[int]:
        """Return the tokens of its prompt."""
        ids: list[int] = self._tokenizer(request.prompt)["input_ids"]
        return ids

    def _vllm_body(self, request: Request, prompt: list[int]) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body |= {"temperature": request.temperature, "seed": request.seed, "return_token_ids": True}
        if request.processor is None:
            return body
        arguments = {"custom_logit_processor": STRINGS[request.processor]}
        return {**body, "vllm_xargs": {**arguments, "custom_params": json.dumps(dict(request.params))}}

    def logprobs(self, request: Request, output: list[int]) -> dict[int, float]:
        """Return the most likely tokens after a part of an answer, and their log-probabilities; only logitship can."""
        body = sglang_body(request, self.prompt_ids(request) + output)
        sampling = {**body["sampling_params"], "max_new_tokens": 1, "logprobs_mode": "processed_logprobs"}
        more = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
        with self._server.resumed():
            (top,) = self._post("/generate", body | more)["meta_info"]["output_top_logprobs"]
        return {token: logprob for logprob, token, _ in top}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(self._server.url + path, json=body, timeout=600)
        if answer.is_error:
            raise RuntimeError(f"{self.name}: {answer.text}")
        return answer.json()


def sglang_body(request: Request, prompt: list[int]) -> dict[str, Any]:
    """Return the body of `POST /generate`."""
    sampling: dict[str, Any] = {"temperature": request.temperature, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
    if request.processor is not None:
        sampling["custom_params"] = dict(request.params)
        body["custom_logit_processor"] = STRINGS[request.processor]
    return body


def verdict(request: Request, expected: list[int], answer: list[int], reference: Side) -> str:
    """Return whether an answer is `equal`, differs after a `near-tie`, or is `different`."""
    if answer == expected:
        return "equal"
    if request.temperature or len(answer) != len(expected):
        return "different"
    place = next(index for index, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1])
    logprobs = reference.logprobs(request, expected[:place])
    one, other = logprobs.get(answer[place]), logprobs.get(expected[place])
    if one is None or other is None:
        return "different"
    print(f"# {request.kind}, {request.prompt!r}, token {place}: {one:.6f} and {other:.6f}")
    return "near-tie" if abs(one - other) <= NEAR_TIE else "different"


def compare(sides: Sequence[Side], asked: Sequence[Request]) -> Counter[tuple[str, str, str]]:
    """Send requests to all servers, one server after the other.

    Returns:
        The number of answers by kind of request, server and verdict.
    """
    answers = {side.name: side.answers(asked) for side in sides}
    reference = next(side for side in sides if side.name == "logitship")
    found: Counter[tuple[str, str, str]] = Counter()
    for name, of_side in answers.items():
        for request, expected, answer in zip(asked, answers["SGLang"], of_side, strict=True):
            if name in request.sides:
                outcome = verdict(request, expected, answer, reference)
                found[request.kind, name, outcome] += 1
                if outcome == "different":
                    print(f"# {name}, {request}:\n#   {answer} instead of\n#   {expected}")
    return found


def table(found: Counter[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| requests | " + " | ".join(SIDES[1:]) + " |"
    yield "|---" * len(SIDES) + "|"
    for kind in dict.fromkeys(kind for kind, _, _ in found):
        cells = [
            ", ".join(
                f"{found[kind, side, each]} {each}"
                for each in ("equal", "near-tie", "different")
                if found[kind, side, each]
            )
            for side in SIDES[1:]
        ]
        yield (
            f"| {found[kind, SIDES[0], 'equal']} {kind} | "
            + " | ".join(cell or "not comparable" for cell in cells)
            + " |"
        )


def commands(options: argparse.Namespace, model: Path, folder: Path) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """Yield the command of each server and its environment."""
    flags = ("--random-seed", "0", "--disable-radix-cache", "--disable-overlap-schedule")
    command, environment = sglang_with_plugin(options.sglang_python, model, folder, *flags)
    yield command, {**environment, "SGLANG_PLUGINS": "none"}
    yield command, environment
    yield (*COMMAND, "--enable-custom-logit-processor", "--dtype", "float32", "--log-level", "error"), {}
    yield vllm_with_plugin(options.vllm_python, model, folder)


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="the interpreter of SGLang's environment")
    parser.add_argument("--vllm-python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--only", default="", help="only the requests with this in their row's name")
    options = parser.parse_args()
    model = default_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_distribution(folder)
        servers = stack.enter_context(listening(*commands(options, model, folder)))
        sides = [Side(name, server, tokenizer) for name, server in zip(SIDES, servers, strict=True)]
        for server in servers:
            stack.enter_context(server.paused())
        found = compare(sides, [request for request in requests() if options.only in request.kind])
    print("\n".join(table(found)))
    return any(outcome == "different" for _, _, outcome in found)


if __name__ == "__main__":
    sys.exit(main())
