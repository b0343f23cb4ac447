"""Forward passes and time of constrained answers: with forced runs, without, and on vLLM and SGLang.

    python benchmarks/forced_tokens.py [--before-python PYTHON] [--vllm-python PYTHON] [--sglang-python PYTHON]

The servers take turns with the same requests, and those whose turn it is not are stopped meanwhile. Each prompt has
two examples of its answer, so that the model writes the usual tokens.

Where nothing is forced, both of our servers compute the same forward passes, whose times differ by some percent between
processes with the same code. So the steps are also compared as if both took the time of the peer's passes.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import comparison
from end_to_end import MAX_MODEL_LEN, vllm_command
from plugin_servers import sglang_command
from processors import SOURCE
from served import COMMAND, Server, ServerCommand, listening

from logitship.server.model.default_model import default_model_folder

BENCHMARK = "forced tokens"
_OURS = ("ours", "one by one", "before")
_STEPS = "logitship_steps_total"
_STEP_SECONDS = "logitship_step_duration_seconds_sum"
_FORWARD_SECONDS = 'logitship_step_phase_duration_seconds_sum{phase="forward"}'

KEYS = ("customer_first_name", "customer_last_name", "preferred_language", "subscription_level", "billing_postal_code")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": 12} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
RECORDS = (
    ("Anna", "Berg", "Swedish", "gold", "11122"),
    ("Paul", "Meyer", "German", "silver", "20095"),
)
SENTENCES = (
    "The delivery will arrive tomorrow in the morning.",
    "Please contact our customer support by telephone.",
    "We are sorry that this product is no longer available.",
)
FRAME = (
    '<tool_call>\n{"name": "search_product_catalogue", "arguments": {"query_text": "%s", '
    '"include_discontinued_products": %s, "sort_results_by_customer_rating": true}}\n</tool_call>'
)
PHRASES = """
from logitship import CustomLogitProcessor
class Phrases(CustomLogitProcessor):
    '''Writes a phrase of twelve tokens after every four of the model's.'''
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            place = len(params["__req__"].output_ids) % 16 - 4
            if place >= 0:
                row[:] = -float("inf")
                row[params["phrase"][place]] = 0.0
        return logits
"""


def _regex(text: str) -> str:
    """Return a regular expression that matches only a text."""
    return "".join(f"\\{letter}" if letter in r"\.[]{}()*+?^$|" else letter for letter in text)


@dataclass(frozen=True)
class Case:
    """A kind of request.

    Attributes:
        prompts: prompts, used in turns.
        constraint: vLLM's `structured_outputs`; None: no constraint.
        others: other fields of the request.
        passes: target of the forward passes, as a share of those without forced runs; None: nothing is forced.
        time: target of the time, for each number of streams.
    """

    prompts: tuple[str, ...]
    constraint: dict[str, Any] | None
    others: dict[str, Any]
    passes: float | None
    time: Callable[[int], float]


def _example(record: tuple[str, ...]) -> str:
    return json.dumps(dict(zip(KEYS, record, strict=True)), separators=(",", ":"))


def _json_prompt(name: str) -> str:
    examples = "".join(f"Record: {_example(record)}\n" for record in RECORDS)
    return f"Customer records in compact JSON.\n{examples}Record of {name}: "


def _tool_prompt(wish: str) -> str:
    calls = [FRAME % ("teapot", "false"), FRAME % ("lamp", "true")]
    return f"I want a teapot.\n{calls[0]}\nI want a lamp, old ones too.\n{calls[1]}\nI want {wish}.\n"


def _choice_prompt(question: str) -> str:
    return (
        f"Q: When will it come?\nA: {SENTENCES[0]}\nQ: Can you help me?\nA: {SENTENCES[1]}\nQ: Do you sell it?\n"
        f"A: {SENTENCES[2]}\nQ: {question}\nA: "
    )


NAMES = ("Maria", "Tom", "Irene", "Li Wei", "Omar", "Ruth", "Jan", "Eva")
FRAME_REGEX = _regex(FRAME).replace("%s", "[a-z]{3,9}", 1).replace("%s", "(true|false)", 1)
CASES = {
    "JSON with five long keys": Case(
        tuple(map(_json_prompt, NAMES)),
        {"json": SCHEMA},
        {"max_tokens": 120},
        0.6,
        lambda streams: 0.65 if streams == 1 else 0.85,
    ),
    "tool call in a frame": Case(
        tuple(map(_tool_prompt, ("a chair", "a red coat", "a bicycle", "new shoes"))),
        {"regex": FRAME_REGEX},
        {"max_tokens": 80},
        0.2,
        lambda streams: 0.65 if streams == 1 else 0.85,
    ),
    "choice among sentences": Case(
        tuple(map(_choice_prompt, ("Is it still on sale?", "When do I get it?", "Who can help?", "Is it late?"))),
        {"choice": list(SENTENCES)},
        {"max_tokens": 40},
        0.35,
        lambda streams: 0.65 if streams == 1 else 0.85,
    ),
    "phrases of a shipped class": Case(
        ("The moon is",),
        None,
        {
            "custom_logit_processor": json.dumps({"source": PHRASES, "class_name": "Phrases"}),
            "custom_params": {"phrase": list(range(1000, 1012))},
            "max_tokens": 64,
            "ignore_eos": True,
        },
        0.4,
        lambda streams: 0.65 if streams == 1 else 0.85,
    ),
    "nothing forced": Case(("The moon is",), None, {"max_tokens": 48, "ignore_eos": True}, None, lambda _: 1.01),
    "nothing forced, 100 tokens forbidden by a shipped class": Case(
        ("The moon is",),
        None,
        {
            "custom_logit_processor": json.dumps({"source": SOURCE, "class_name": "BanSome"}),
            "custom_params": {"banned": list(range(40_000, 40_100))},
            "max_tokens": 48,
            "ignore_eos": True,
        },
        None,
        lambda _: 1.01,
    ),
}
"""Peers answer the constrained ones."""


@dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Attributes:
        token_ids: its tokens; None if the server was not asked for them.
    """

    text: str
    num_tokens: int
    token_ids: list[int] | None


class Side:
    """A server, and what a turn of it is. It is paused between its turns.

    Args:
        name: `ours`, `one by one`, `before` (an older logitship), `vLLM` or `SGLang`.
        server: answers.

    Attributes:
        is_ours: it is a logitship, which counts its forward passes.
        passes: the forward passes of each turn; 0 for peers, which do not count them.
        forward, others: seconds of its forward passes, and of all else in its steps; 0 for peers.
    """

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.passes: list[float] = []
        self.forward: list[float] = []
        self.others: list[float] = []
        self._server = server
        self._model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        self.is_ours = name in _OURS

    def turn(self, case: Case, streams: int, requests: int) -> float:
        """Return the seconds of all requests."""
        with self._server.resumed():
            before = self._counts()
            arrivals = self._server.stream("/v1/completions", self._bodies(case, requests), streams)
            passes, step, forward = (now - then for now, then in zip(self._counts(), before, strict=True))
        self.passes.append(passes)
        self.forward.append(forward)
        self.others.append(step - forward)
        return max(each[-1] for each in arrivals) - min(each[0] for each in arrivals)

    def clear(self) -> None:
        """Drop the counts of the turns so far."""
        for counts in (self.passes, self.forward, self.others):
            counts.clear()

    def _counts(self) -> tuple[float, float, float]:
        """Return the steps so far, their seconds, and those of their forward passes."""
        if not self.is_ours:
            return 0.0, 0.0, 0.0
        metrics = self._server.metrics()
        return metrics[_STEPS], metrics[_STEP_SECONDS], metrics[_FORWARD_SECONDS]

    def answers(self, case: Case) -> list[Answer]:
        """Return the answer to each of a case's prompts, asked for one at a time."""
        with self._server.resumed():
            return [self._answer(body) for body in self._bodies(case, len(case.prompts))]

    def _answer(self, body: dict[str, Any]) -> Answer:
        more = {"return_token_ids": True} if self.is_ours else {}
        data = json.dumps({**body, **more}).encode()
        request = urllib.request.Request(
            self._server.url + "/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer = json.loads(response.read())
        choice = answer["choices"][0]
        return Answer(choice["text"], answer["usage"]["completion_tokens"], choice.get("token_ids"))

    def _bodies(self, case: Case, requests: int) -> list[dict[str, Any]]:
        constraint: dict[str, Any] = {}
        if case.constraint is not None:
            is_sglang = self.name == "SGLang"
            constraint = _for_sglang(case.constraint) if is_sglang else {"structured_outputs": case.constraint}
        shared = {"model": self._model, "temperature": 0.0, **constraint, **case.others}
        return [{"prompt": case.prompts[number % len(case.prompts)], **shared} for number in range(requests)]


def _for_sglang(constraint: dict[str, Any]) -> dict[str, Any]:
    if "json" in constraint:
        return {"json_schema": json.dumps(constraint["json"])}
    return {"regex": constraint.get("regex") or "(" + "|".join(map(_regex, constraint["choice"])) + ")"}


def measure(sides: list[Side], options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Let the servers take turns with each case."""
    for name, case in CASES.items():
        if options.only in name:
            taking_part = [side for side in sides if case.constraint or side.is_ours]
            yield _equality(name, case, taking_part)
            for streams in options.streams:
                yield from _speed(f"{name}, {streams} at a time", case, streams, taking_part, options)


def _equality(name: str, case: Case, sides: list[Side]) -> comparison.Comparison:
    """Compare the tokens of both of our servers; print how long the answers of all are."""
    answers = [side.answers(case) for side in sides]
    for side, of_side in zip(sides, answers, strict=True):
        lengths = [answer.num_tokens for answer in of_side]
        print(f"# {name}, {side.name}: {sum(lengths) / len(lengths):.1f} tokens, {of_side[0].text!r}"[:200])
    ours, one_by_one = answers[:2]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(ours, one_by_one, strict=True))
    return comparison.alone(BENCHMARK, name, [equal / len(ours)], unit="equal", target=comparison.at_least(1))


def _speed(
    label: str, case: Case, streams: int, sides: list[Side], options: argparse.Namespace
) -> Iterator[comparison.Comparison]:
    """Compare the forward passes of both of our servers, or all else in their steps, and the time of all."""
    turns = [partial(side.turn, case, streams, streams * options.requests) for side in sides]
    for side, turn in zip(sides, turns, strict=True):
        turn()
        side.clear()
    seconds = comparison.in_turns(turns, options.turns)
    if case.passes is not None:
        target = comparison.at_most(case.passes) if streams == 1 else None
        yield _of_peer(label, sides[0].passes, sides[1].passes, "passes", "one by one", target)
    else:
        ours, peer = ([*map(sum, zip(sides[1].forward, side.others, strict=True))] for side in sides[:2])
        title = f"{label}, the same forward passes"
        yield _of_peer(title, ours, peer, "s", "one by one", comparison.at_most(case.time(streams)))
    for side, peer_seconds in zip(sides[1:], seconds[1:], strict=True):
        target = comparison.at_most(case.time(streams) if side.is_ours else 1.0)
        yield _of_peer(label, seconds[0], peer_seconds, "s", side.name, target)


def _of_peer(
    label: str, ours: list[float], peer: list[float], unit: str, name: str, target: comparison.Target | None
) -> comparison.Comparison:
    return comparison.compare(
        BENCHMARK, f"{label}, {name}", ours, peer, unit=unit, peer_name=name, kind=comparison.OF_PEER, target=target
    )


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--sglang-python", help="a Python that has SGLang")
    parser.add_argument("--before-python", help="a Python that has an older logitship, with or without forced runs")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="requests for each stream in a turn")
    parser.add_argument("--only", default="", help="only the cases with this in their names")
    options = parser.parse_args()
    model = default_model_folder()
    flags = ("--enable-custom-logit-processor", "--max-model-len", MAX_MODEL_LEN, "--log-level", "error")
    commands: dict[str, ServerCommand] = {
        "ours": ((*COMMAND, *flags), {}),
        "one by one": ((*COMMAND, *flags, "--max-forced-run", "0"), {}),
    }
    if options.before_python:
        commands["before"] = ((options.before_python, *COMMAND[1:], *flags), {})
    if options.vllm_python:
        commands["vLLM"] = vllm_command(options.vllm_python, model)
    if options.sglang_python:
        commands["SGLang"] = sglang_command(options.sglang_python, model, "--disable-overlap-schedule")
    with listening(*commands.values()) as servers:
        sides = [Side(name, server) for name, server in zip(commands, servers, strict=True)]
        with ExitStack() as stack:
            for server in servers:
                stack.enter_context(server.paused())
            comparison.report(measure(sides, options), options.json)


if __name__ == "__main__":
    main()
