"""Attempts to leave the sandbox from a call of a processor. Each statement raises if it is prevented."""

from __future__ import annotations

import json
import textwrap

ESCAPES: dict[str, str] = {
    "read the passwords": "open('/etc/passwd').read()",
    "list the home of root": "assert os.listdir('/root')",
    "list the processes": "assert [each for each in os.listdir('/proc') if each.isdigit() and int(each) > 2]",
    "read the server's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "write a file": "open('/tmp/escaped', 'w').write('x')",
    "write shared memory": "open('/dev/shm/escaped', 'w').write('x')",
    "open an internet socket": "socket.socket(socket.AF_INET)",
    "open a Unix socket": "socket.socket(socket.AF_UNIX)",
    "connect to SGLang": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "resolve a name": "socket.getaddrinfo('localhost', {port})[0]; socket.create_connection(('localhost', {port}), 2)",
    "run a program": "subprocess.run(['/bin/true'], check=True)",
    "run a shell": "assert os.system('true') == 0",
    "fork": "os.fork() or os._exit(0)",
    "replace the program": "os.execv('/bin/true', ['true'])",
    "signal the parent": "os.kill(os.getppid(), 0)",
    "signal all": "os.kill(-1, 0)",
    "trace itself": "assert libc.ptrace(0, 0, 0, 0) == 0",
    "enter a user namespace": "assert libc.unshare(0x10000000) == 0",
    "mount": "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "change the root": "os.chroot('/')",
    "become root": "os.setuid(0); assert os.getuid() == 0 and open('/etc/shadow').read()",
    "make a device": "os.mknod('/tmp/escaped-device', 0o600 | 0o020000, os.makedev(1, 3))",
    "make anonymous files": "os.memfd_create('escaped')",
    "read the kernel's log": "open('/dev/kmsg').read(1)",
}

_SOURCE = """
import ctypes, os, socket, subprocess
import torch
from logitship import CustomLogitProcessor

def attempt():
    libc = ctypes.CDLL(None)
{statement}

class Escapes(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        try:
            attempt()
            escaped = True
        except BaseException:
            escaped = False
        logits.fill_(-float("inf"))
        logits[:, 1001 if escaped else 1000] = 0.0
        return logits
"""
PREVENTED, ESCAPED = 1000, 1001
"""The tokens that the processor forces."""


def escaping(attempt: str, port: int) -> str:
    """Return the processor string of one of `ESCAPES`.

    Args:
        attempt: its name.
        port: SGLang's.
    """
    statement = textwrap.indent(ESCAPES[attempt].replace("{port}", str(port)), "    ")
    return json.dumps({"source": _SOURCE.format(statement=statement), "class_name": "Escapes"})
