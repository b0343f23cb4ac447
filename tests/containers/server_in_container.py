"""Serves the tiny model inside a container, attacks it with shipped processors, and prints what happened as JSON.

Usage: `server_in_container.py MODEL FLAG…`, the flags being those of `logitship serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from typing import Any

import httpx

SOURCE = """
import ctypes, os, socket, subprocess, time
from logitship import CustomLogitProcessor

class Shipped(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        {statement}
        logits.fill_(-float("inf"))
        logits[:, 10] = 0.0
        return logits
"""

ATTEMPTS = {
    "nothing": "pass",
    "read the passwords": "open('/etc/passwd').read()",
    "read the server's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "write a file": "open('/tmp/escaped', 'w').write('x')",
    "write shared memory": "open('/dev/shm/escaped', 'w').write('x')",
    "open an internet socket": "socket.socket(socket.AF_INET)",
    "run a program": "subprocess.run(['/bin/true'], check=True)",
    "fork": "os.fork() or os._exit(0)",
    "signal the parent": "os.kill(os.getppid(), 0)",
    "enter a user namespace": "assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "become root": "os.setuid(0); open('/etc/shadow').read()",
    "allocate": "bytearray(2 << 30)",
    "loop": "exec('while True: pass')",
    "crash": "ctypes.string_at(0)",
    "nothing again": "pass",
}
"""Statement that each processor executes before it forces token 10: after a fault, the server must serve as before."""
EXPECTED = {
    **dict.fromkeys(ATTEMPTS, "exception"),
    "nothing": "",
    "nothing again": "",
    "loop": "deadline",
    "crash": "crash",
}
"""The kind of the fault of each; "" if the token was forced."""
FORCED = 10
START_TIMEOUT = 120.0


def main(model: str, flags: list[str]) -> None:
    command = [sys.executable, "-c", "import sys; from logitship.server.cli import main; sys.exit(main())", "serve"]
    command += ["--model-path", model, "--device", "cpu", "--port", "30000", "--enable-custom-logit-processor", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    started = threading.Event()
    reader = threading.Thread(target=read_log, args=(server, log, started), daemon=True)
    reader.start()
    started.wait(START_TIMEOUT)
    report: dict[str, Any] = {"user": os.geteuid(), "faults": {}, "threads": 0}
    if any("running on http" in line for line in log):
        # It starts the threads that it needs with the first requests.
        with httpx.Client(base_url="http://127.0.0.1:30000", timeout=START_TIMEOUT) as client:
            report["faults"] = {name: fault_of(client, statement) for name, statement in ATTEMPTS.items()}
        with contextlib.suppress(OSError):
            report["threads"] = len(os.listdir(f"/proc/{server.pid}/task"))
        report["alive"] = server.poll() is None
        server.terminate()
    report["status"] = server.wait(START_TIMEOUT)
    reader.join(START_TIMEOUT)
    report["log"] = "".join(log)
    found = re.search(r"run in sandboxes, protected by: (.*)", report["log"])
    report["protections"] = found[1] if found else ""
    print(json.dumps(report), flush=True)


def read_log(server: subprocess.Popen[str], log: list[str], started: threading.Event) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        log.append(line)
        if "running on http" in line:
            started.set()
    started.set()


def fault_of(client: httpx.Client, statement: str) -> str:
    """Return the kind of the fault of a processor, or the whole answer; "" if it forced its token."""
    body = {
        "text": "hello",
        "custom_logit_processor": json.dumps({"source": SOURCE.format(statement=statement), "class_name": "Shipped"}),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    answer = client.post("/generate", json=body)
    found: dict[str, Any] = answer.json()
    if answer.status_code != httpx.codes.OK:
        return str(found.get("error", {}).get("kind") or found)
    return "" if found["output_ids"] == [FORCED] else str(found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
