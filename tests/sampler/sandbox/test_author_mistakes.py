"""Code that works elsewhere, and what its author reads when a sandbox refuses it."""

from __future__ import annotations

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor

from .conftest import Caller, source

NO_FILES = (
    "the sandbox has no files. Read the file at the top of your module, into a constant: it is serialized with the "
    "class. Or send what differs from request to request as custom_params"
)
NO_NETWORK = "the sandbox has no network. Fetch the data before you send the class, or send it as custom_params"
NO_GPU = (
    "there is no GPU in the sandbox: make tensors with device=logits.device, and call neither .cuda() nor .to('cuda')"
)

NO_MEMORY = (
    "the sandbox's memory is limited by the server's sandbox_memory: make large tables once, in "
    "prepare(self, tokenizer, vocab_size), and of a small dtype"
)


@pytest.mark.parametrize(
    ("body", "error", "hint"),
    [
        ("open('/a/b/words.txt')", "'/a/b/words.txt'", NO_FILES),
        ("import pathlib; pathlib.Path('words.json').read_text()", "'words.json'", NO_FILES),
        ("open('out.txt', 'w')", "'out.txt'", NO_FILES),
        ("import urllib.request; urllib.request.urlopen('http://example.com')", "URLError", NO_NETWORK),
        ("import socket; socket.create_connection(('10.0.0.1', 80))", "Operation not permitted", NO_NETWORK),
        ("import httpx; httpx.get('http://example.com')", "ConnectError", NO_NETWORK),
        ("logits = logits.cuda()", "", NO_GPU),
        ("x = torch.zeros(3, device='cuda')", "", NO_GPU),
        (
            "import threading; threading.Thread(target=print).start()",
            "can't start new thread",
            "the sandbox has no threads of its own: compute in __call__",
        ),
        ("import subprocess; subprocess.run(['ls'])", "", "the sandbox cannot start processes"),
        ("x = torch.ones(1 << 30)", "can't allocate memory", NO_MEMORY),
        ("x = bytearray(1 << 32)", "MemoryError", NO_MEMORY),
        (
            "import no_such_package",
            "No module named 'no_such_package'",
            "the server does not have this package: copy what you need of it into your own module, which is serialized "
            "with the class",
        ),
    ],
)
def test_refused_operation_is_explained(
    body: str, error: str, hint: str, executor: SandboxExecutor, caller: Caller
) -> None:
    processor = executor.load(source(f"{body}\nreturn logits"))
    _, outcome = caller.call(processor, caller.attach(processor))
    fault = outcome.faults[0]
    assert fault.message.endswith(f" ({hint})"), fault.message
    assert error in fault.message
    assert fault.traceback.count("Traceback (most recent call last)") == 1
    assert body.partition("; ")[2] in fault.traceback


def test_refused_operation_at_load(executor: SandboxExecutor) -> None:
    code = (
        "from logitship import CustomLogitProcessor\nWORDS = open('words.txt').read()\n"
        "class P(CustomLogitProcessor):\n    def __call__(self, logits, custom_param_list=None):\n"
        "        return logits\n"
    )
    with pytest.raises(ProcessorLoadError) as caught:
        executor.load(SourceProcessor(code, "P"))
    first, *traceback = str(caught.value).splitlines()
    assert first == (
        "the source raised while it was loaded: FileNotFoundError: [Errno 2] No such file or directory: 'words.txt' "
        f"({NO_FILES})"
    )
    assert traceback[-2].strip() == "WORDS = open('words.txt').read()"


def test_unknown_attribute_of_the_request(executor: SandboxExecutor, caller: Caller) -> None:
    processor = executor.load(source("custom_param_list[0]['__req__'].output_text\nreturn logits"))
    _, outcome = caller.call(processor, caller.attach(processor))
    assert outcome.faults[0].message == (
        "processor P raised AttributeError: __req__ has no attribute 'output_text'; it has eos_token_ids, "
        "origin_input_ids, output_ids, rid, sampling_params, state, tokenizer, vocab_size. For the text: "
        "__req__.tokenizer.decode(__req__.output_ids), or only its last tokens"
    )
