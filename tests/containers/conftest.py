"""Fixtures that run programs in containers of podman, with this machine's libraries and Python in them.

No image is needed: the root directory is an empty one, into which the folders that Python needs are bind-mounted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 280.0
"""Seconds for a program in a container."""
FIRST_MAPPED_ID = 200_000
SYSTEM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
PRIVATE_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "var/tmp")


@dataclass(frozen=True)
class Podman:
    """Runs programs in containers.

    Attributes:
        root_folder: the root directory of the containers.
        state: podman's own files.
        volumes: folders of this machine that are mounted at their own path, read-only.
    """

    root_folder: Path
    state: Path
    volumes: tuple[Path, ...]

    @property
    def command(self) -> list[str]:
        """The program, with storage of its own."""
        storage = ["--root", str(self.state / "root"), "--runroot", str(self.state / "run")]
        return ["podman", *storage, "--cgroup-manager", "cgroupfs"]

    def run(self, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command, and wait for it.

        Args:
            command: the command.
            options: options of `podman run`.
        """
        podman = [*self.command, "run", "--runtime", "runc", "--rm", "--network", "none"]
        # Of the shell that runs the tests, which a container without capabilities could not raise.
        podman += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
        for name in ("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):
            podman += ["--env", f"{name}=1"]
        podman += ["--env", "HOME=/tmp", "--workdir", "/tmp", *options, "--rootfs", str(self.root_folder), *command]
        # Not volumes of podman, which a runtime in a user namespace cannot reach below private directories: mounts in a
        # mount namespace of this command, which end with it.
        mounts = [
            shlex.join(["mount", "-o", "bind,ro", str(path), f"{self.root_folder}{path}"]) for path in self.volumes
        ]
        script = " && ".join(["mount --make-rprivate /", *mounts, f"exec {shlex.join(podman)}"])
        command_line = ["unshare", "--mount", "sh", "-c", script]
        return subprocess.run(command_line, capture_output=True, text=True, timeout=TIMEOUT)

    def serve(self, *flags: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        """Run `server_in_container.py` with flags of `logitship serve`, and return its report."""
        program = str(Path(__file__).with_name("server_in_container.py"))
        run = self.run(sys.executable, "-I", program, "/model", *flags, options=options)
        assert run.stdout, run.stderr
        report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return report


@pytest.fixture(scope="session")
def podman(model_folder: Path) -> Iterator[Podman]:
    if shutil.which("podman") is None or shutil.which("runc", path=os.environ["PATH"] + ":/usr/sbin") is None:
        pytest.skip("needs podman and runc: apt-get install podman runc")
    if os.geteuid() != 0:
        pytest.skip("needs root, which may start containers with any user and any limit")
    # In a folder with a short path, as podman demands, that root of a user namespace can reach.
    with tempfile.TemporaryDirectory(prefix="podman-", ignore_cleanup_errors=True) as state:
        os.chmod(state, 0o755)
        found = Podman(_root_folder(Path(state, "rootfs"), model_folder), Path(state), _volumes())
        for folder in found.volumes:
            (found.root_folder / folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
        yield found
        subprocess.run([*found.command, "rm", "--all", "--force"], capture_output=True, check=True)


def _root_folder(folder: Path, model: Path) -> Path:
    before = os.umask(0o022)  # other users than root must be able to read it
    try:
        folder.mkdir(mode=0o755)
        for name in PRIVATE_FOLDERS:
            (folder / name).mkdir(parents=True)
        for name in ("tmp", "var/tmp"):
            (folder / name).chmod(0o1777)
        for name in SYSTEM_FOLDERS:
            original = Path("/", name)
            if original.is_symlink():
                (folder / name).symlink_to(os.readlink(original))
        for name in ("ld.so.cache", "nsswitch.conf"):
            shutil.copy(Path("/etc", name), folder / "etc")
        (folder / "etc/passwd").write_text("root:x:0:0::/tmp:/bin/sh\nserver:x:1000:1000::/tmp:/bin/sh\n")
        (folder / "etc/group").write_text("root:x:0:\nserver:x:1000:\n")
        (folder / "etc/shadow").write_text("root:secret:::::::\n")
        (folder / "etc/shadow").chmod(0o600)
        shutil.copytree(model, folder / "model", copy_function=shutil.copyfile)
        (folder / "model").chmod(0o755)
    finally:
        os.umask(before)
    return folder


def _volumes() -> tuple[Path, ...]:
    """Return the folders of the libraries, of Python and of this project, without those inside another."""
    system = [Path("/", name) for name in SYSTEM_FOLDERS]
    python = [Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if os.path.isdir(path)]
    needed = [path for path in system if path.is_dir() and not path.is_symlink()]
    needed += [path for each in (*python, ROOT) for path in (each.absolute(), each.resolve())]
    return tuple(sorted({path for path in needed if not any(parent in needed for parent in path.parents)}))
