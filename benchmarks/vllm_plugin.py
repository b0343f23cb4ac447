"""Overhead of the plugin inside vLLM: loaded and not used, and used by all requests.

    tests/peers/vllm_cpu.sh VENV && VENV/bin/python benchmarks/vllm_plugin.py --model FOLDER

Three engines of vLLM with the same model take turns in one run: one without logits processors, one with logitship's
plugin, and one with a processor written for vLLM's own V1 interface that makes the same edit in vLLM's process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "benchmarks")))  # for vLLM's own processes
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR"] = "1"

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

PROMPT = "The moon is"
SIDES = ("alone", "loaded", "shipped", "bare")
"""vLLM alone; the plugin, unused; the plugin, by all requests; the bare V1 interface, by all requests."""


def banned(stream: int) -> list[int]:
    """Return the tokens that a request forbids: rare ones, so that all sides sample nearly the same output."""
    return list(range(40_000 + stream, 40_100 + stream))


def sampling(side: str, streams: int, tokens: int) -> list[SamplingParams]:
    """Return the parameters of a turn's requests, one per stream."""
    from processors import SOURCE
    from vllm import SamplingParams

    def extra_args(stream: int) -> dict[str, Any] | None:
        if side == "shipped":
            string = json.dumps({"source": SOURCE, "class_name": "BanSome"})
            return {"custom_logit_processor": string, "custom_params": json.dumps({"banned": banned(stream)})}
        return {"banned": banned(stream)} if side == "bare" else None

    return [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra_args(stream))
        for stream in range(streams)
    ]


def seconds_of(llm: LLM, params: list[SamplingParams]) -> float:
    """Return the total time of the requests, prompts included."""
    began = time.perf_counter()
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == params[0].max_tokens for output in outputs)
    return seconds


def rotated(turn: int) -> tuple[str, ...]:
    """Return the sides, starting with a different one each turn: the side before may leave the machine warm."""
    first = turn % len(SIDES)
    return SIDES[first:] + SIDES[:first]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each stream")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    options = parser.parse_args()

    from vllm import LLM

    def engine(*logits_processors: str) -> LLM:
        named = {"logits_processors": list(logits_processors)} if logits_processors else {}
        return LLM(
            options.model, dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=True, **named
        )

    plugin = engine("logitship.server.vllm:LogitshipLogitsProcessor")
    engines = {
        "alone": engine(),
        "loaded": plugin,
        "shipped": plugin,
        "bare": engine("vllm_bare_processor:BareProcessor"),
    }
    params = {side: sampling(side, options.streams, options.tokens) for side in SIDES}
    turn: Callable[[str], float] = lambda side: seconds_of(engines[side], params[side])  # noqa: E731
    for side in SIDES:
        turn(side)
    turns = [{side: turn(side) for side in rotated(number)} for number in range(options.rounds)]
    print(f"\n{options.streams} requests of {options.tokens} tokens, median of {options.rounds} turns")
    print(f"{'':>8} {'tokens/s':>9} {'ms a step':>10} {'time, vs. vLLM alone':>24}")
    for side in SIDES:
        seconds = statistics.median(each[side] for each in turns)
        ratio = statistics.median(each[side] / each["alone"] for each in turns)
        speed = options.streams * options.tokens / seconds
        print(f"{side:>8} {speed:9.1f} {seconds / options.tokens * 1e3:10.2f} {ratio:24.3f}")


if __name__ == "__main__":
    main()
