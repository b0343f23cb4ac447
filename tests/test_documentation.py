"""The pages of the documentation: examples run, and the flags, routes, errors and files in them exist."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import runpy
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import pytest

from logitship.server.check.check_options import CHECKS
from logitship.server.cli import main
from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import RequestRefused
from tests.helpers.scripts import load_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    ROOT.glob("docs/*.md")
)
IN_THE_EXAMPLES = "http://127.0.0.1:30000"
"""URL of the server in the examples."""
ON_THE_DEFAULT_MODEL = {
    "cookbook.md",
    "migrating-from-huggingface.md",
    "migrating-from-sglang.md",
    "migrating-from-vllm.md",
    "traces.md",
}
"""Pages whose examples show answers of the default model. The others run on a tiny one."""
LOADS_THE_DEFAULT_MODEL = {"beam-search.md", "checking.md", "offline.md", "transformers.md"}
"""Pages whose examples load the default model themselves."""
TAKES_LONG = {"grpo.md"}
BY_ITSELF = {"tutorial.md"}
"""Followed command by command: `tests/end_to_end/test_tutorial.py`."""

SGLANG_SERVE = (
    'pip install "logitship[sglang]"\n'
    "python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --enable-custom-logit-processor"
)
VLLM_SERVE = (
    'pip install "logitship[vllm]"\n'
    "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR=1 vllm serve Qwen/Qwen3-0.6B \\\n"
    "  --logits-processors logitship.server.vllm:LogitshipLogitsProcessor"
)
# These install something, start something that keeps running, or need something that the tests do not have.
NOT_RUN = {
    "checking.md": ["""logitship check ban.py:Ban --params '{"token_ids": [30]}'"""],
    "README.md": [
        "python3 -m venv .venv && source .venv/bin/activate",
        'pip install -c constraints.txt -e ".[serve]" && logitship demo',
        'pip install -c constraints.txt -e ".[serve,dev]" && scripts/test',
        "logitship serve --enable-custom-logit-processor",
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --enable-custom-logit-processor",
        VLLM_SERVE,
    ],
    "deterministic.md": ["logitship serve --enable-deterministic-inference"],
    "speculative-decoding.md": ["logitship serve --speculative-algorithm NGRAM"],
    "builtin-processors.md": [
        "logitship serve --tree cities=cities.json products=products.json",
        "head -c 32 /dev/urandom | base64 > watermark.key && chmod 600 watermark.key\n"
        """logitship serve --watermark-key-file watermark.key --default-processor 'watermark_kgw={"bias": 2.5}'""",
        """logitship detect-watermark answer.txt --watermark-key-file watermark.key --params '{"bias": 2.5}'""",
    ],
    "sampling.md": [
        "logitship serve --model Qwen/Qwen3-0.6B \\\n"
        """  --reasoning-config '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'""",
    ],
    "server.md": [
        "export LOGITSHIP_API_KEY=first-key,second-key LOGITSHIP_SHIPPING_API_KEY=third-key\n"
        "logitship serve --enable-custom-logit-processor",
        """logitship serve --default-processor 'disallowed_tokens={"token_ids": [30]}' """
        "--default-processor Lipogram=@lipogram.json",
    ],
    "writing-processors.md": [
        """logitship dev lipogram.py --prompt "Name the seasons." --params '{"letter": "e"}'""",
    ],
    "tutorial.md": [
        'python3 -m venv .venv && source .venv/bin/activate\npip install -c constraints.txt -e ".[serve]"',
    ],
    "sglang.md": [
        SGLANG_SERVE,
        "logitship doctor sglang http://localhost:30000",
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --enable-custom-logit-processor \\\n"
        "  --speculative-algorithm NGRAM",
    ],
    "vllm.md": [VLLM_SERVE, "logitship doctor vllm http://localhost:8000"],
    "CONTRIBUTING.md": [
        'python3 -m venv .venv && source .venv/bin/activate\npip install -c constraints.txt -e ".[serve,dev]"',
        "mkdocs serve",
        'pip install -e ".[serve,dev]"\nscripts/test\npip freeze --exclude-editable',
    ],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: ```` ```<language> <word> ````."""

    page: Path
    line: int
    language: str
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    content = page.read_text()
    for found in re.finditer(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL):
        line = content.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[1], found[2], found[3])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
CURL_BLOCKS = [block for block in BLOCKS if block.language == "bash" and not block.word]
PYTHON_PAGES = [
    page
    for page in PAGES
    if page.name not in BY_ITSELF and any(block.language == "python" for block in blocks_of(page))
]


def marks_of(page: Path) -> Sequence[pytest.MarkDecorator]:
    """Return the marks of the tests that run the examples of a page."""
    takes_long = ON_THE_DEFAULT_MODEL | LOADS_THE_DEFAULT_MODEL | TAKES_LONG
    return [pytest.mark.thorough] if page.name in takes_long else []


@pytest.fixture(scope="module")
def base_url(loaded_model: LoadedModel) -> Iterator[str]:
    """A server on the tiny model that takes shipped code."""
    config = ServerConfig(
        model_path="tiny",
        port=0,
        max_num_seqs=4,
        random_seed=0,
        enable_custom_logit_processor=True,
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
        log_level="error",
    )
    with running_server(config, build_engine(config, loaded_model)) as url:
        yield url


@pytest.fixture(scope="module")
def default_model_url() -> Iterator[str]:
    """The same on the default model."""
    config = ServerConfig(
        port=0,
        max_model_len=1024,
        enable_custom_logit_processor=True,
        logits_processor_pattern=r"(transformers|logits_processor_zoo)\..*",
        sandbox_step_timeout=30,  # some make a table of the vocabulary in their first step, here on a busy machine
        sandbox_load_timeout=60,  # and one imports transformers
        log_level="error",
    )
    with running_server(config) as url:
        yield url


def server_for(page: Path, request: pytest.FixtureRequest) -> str:
    """Return the base URL of the server for the examples of a page."""
    url: str = request.getfixturevalue("default_model_url" if page.name in ON_THE_DEFAULT_MODEL else "base_url")
    return url


# --- the examples ---


def test_blocks_are_of_a_known_kind() -> None:
    assert {(block.language, re.sub(r'^title=".*"$', "title", block.word)) for block in BLOCKS} == {
        ("bash", ""),
        ("bash", "no-run"),
        ("console", ""),
        ("console", "background"),
        ("json", ""),
        ("python", ""),
        ("python", "title"),
        ("text", ""),
        ("yaml", ""),
    }


def test_blocks_that_are_not_run_are_listed() -> None:
    not_run: dict[str, list[str]] = {}
    for block in BLOCKS:
        if block.word == "no-run":
            not_run.setdefault(block.page.name, []).append(block.text.strip())
    assert not_run == NOT_RUN


@pytest.mark.timeout(1500)  # the cookbook generates much, on a machine that may be busy
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name, marks=marks_of(page)) for page in PYTHON_PAGES])
def test_python_of_a_page_runs_as_one_script(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_shown: Callable[[str, str], bool],
) -> None:
    """Compare each `text` block right after a Python block with what the block prints."""
    base_url = server_for(page, request)
    examples = re.findall(
        r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", page.read_text(), re.MULTILINE | re.DOTALL
    )
    end_of_example = "--- end of an example ---"
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    parts = [f"{code}\n\nprint({end_of_example!r})\n" for code, _ in examples]
    script.write_text("\n\n".join(parts).replace(IN_THE_EXAMPLES, base_url))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        gc.collect()  # the model that the page loaded takes more than a GB
    printed = capsys.readouterr().out.split(end_of_example)
    for (_, expected), output in zip(examples, printed, strict=False):
        if expected:
            assert is_shown(expected, output), f"{output}is not\n{expected}"


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=str(block), marks=marks_of(block.page)) for block in CURL_BLOCKS]
)
def test_curl_commands_run(block: Block, request: pytest.FixtureRequest) -> None:
    command = shlex.split(block.text)
    assert command.count("curl") == 1
    assert command[0] == "curl"
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-H", dest="header")
    parser.add_argument("-d", dest="body")
    curl = parser.parse_args(command[1:])
    assert curl.url.startswith(IN_THE_EXAMPLES)
    name, _, value = curl.header.partition(": ")
    url = curl.url.replace(IN_THE_EXAMPLES, server_for(block.page, request))
    answer = httpx.post(url, content=curl.body, headers={name: value}, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json_is_valid(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


def test_generate_response_has_the_documented_fields(base_url: str) -> None:
    request = next(block for block in CURL_BLOCKS if block.page.name == "server.md" and "/generate" in block.text)
    shown = next(block for block in BLOCKS if block.language == "json" and '"meta_info"' in block.text)
    body = json.loads(shlex.split(request.text)[-1])
    answer = httpx.post(f"{base_url}/generate", json=body, timeout=60).json()
    expected = json.loads(shown.text)
    assert list(answer) == list(expected)
    assert list(answer["meta_info"]) == list(expected["meta_info"])


# --- what the pages say of the program ---


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables of a section, without their headings."""
    content = (ROOT / page).read_text()
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", content, re.MULTILINE | re.DOTALL)
    assert match is not None, f"{page} has no section {heading!r}"
    lines = [line for line in match[2].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [number for number, row in enumerate(rows) if set("".join(row)) == {"-"}]
    return [row for number, row in enumerate(rows) if number not in rules and number + 1 not in rules]


def test_flags_match_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    in_parser = [re.findall(r"--[a-z-]+", line.split("  ")[1]) for line in lines]
    in_page = [re.findall(r"--[a-z-]+", row[0]) for row in rows_of("docs/server.md", "Flags")]
    assert in_page == in_parser


def test_flag_defaults_match_the_configuration() -> None:
    def shown(default: object) -> str:
        return "" if default in (None, ()) else "off" if default is False else f"`{default}`"

    in_config = {f"--{field.name.replace('_', '-')}": shown(field.default) for field in fields(ServerConfig)}
    in_page = {re.findall(r"--[a-z-]+", row[0])[0]: row[1] for row in rows_of("docs/server.md", "Flags")}
    assert in_page == in_config


def test_all_checks_are_documented() -> None:
    assert [codes_in(row[0]) for row in rows_of("docs/checking.md", "The checks")] == [[name] for name in CHECKS]


def test_options_of_check_match_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    in_parser = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    in_page = [name for row in rows_of("docs/checking.md", "Options") for name in codes_in(row[0])]
    assert in_page == ["TARGET", *in_parser]


def test_routes_match_the_server(base_url: str) -> None:
    paths = httpx.get(f"{base_url}/openapi.json").json()["paths"]
    in_page = {tuple(route.split(" ")) for row in rows_of("docs/server.md", "Routes") for route in codes_in(row[0])}
    assert {path for _, path in in_page} == set(paths)
    assert [(method, path) for method, path in in_page if method.lower() not in paths[path]] == []


def codes_in(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def refusals(base: type[RequestRefused] = RequestRefused) -> Iterator[type[RequestRefused]]:
    for cls in base.__subclasses__():
        yield cls
        yield from refusals(cls)


def test_refusals_are_documented() -> None:
    listed = {(row[0], *codes_in(row[1])) for row in rows_of("docs/server.md", "Errors")}
    assert {(str(cls.status_code), cls.type) for cls in refusals()} <= listed


def test_sampling_parameters_are_documented() -> None:
    module = importlib.import_module("logitship.server.schemas.sglang_schemas")
    in_page = {name for row in rows_of("docs/sampling.md", "Parameters") for name in codes_in(row[0])}
    elsewhere = {"custom_params", "logprobs_mode", "no_stop_trim"}
    about_text = {"skip_special_tokens", "spaces_between_special_tokens"}
    missing = set(module.SGLangSamplingParams.model_fields) - in_page - elsewhere - about_text
    assert missing == set()


def test_ci_runs_the_command_of_the_readme() -> None:
    second = NOT_RUN["README.md"][2]
    assert second in (ROOT / "README.md").read_text().splitlines()
    assert second in map(str.strip, (ROOT / ".ci" / "run").read_text().splitlines())


def test_page_of_compatibility_is_up_to_date() -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text() == load_script("compatibility").page()


def test_changelog_has_an_unreleased_section() -> None:
    assert re.search(r"^## \[Unreleased\]$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


# --- links and paths ---


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """Return GitHub's anchors: lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_link_targets_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    broken = []
    for link in links:
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    tops = "benchmarks|client|sampler|builtin_processors|server|tests|scripts|docs|src"
    paths = re.findall(rf"`((?:{tops})/[\w/.-]*)(?: [^`]*)?`", prose_of(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []
