"""Memory of multiplications with many different numbers of rows."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from logitship.server.model.fused_decoder import PackedLinear, can_pack

def memory():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon:"))

assert can_pack(torch.device("cpu"), torch.float32)
linear = PackedLinear(torch.ones(64, 64))
with torch.inference_mode():
    sizes = [memory()]
    for rows in range(1, 901):
        assert linear(torch.ones(rows, 64))[-1, -1] == 64
        if rows % 300 == 0:
            sizes.append(memory())
print(sizes[3] - sizes[1])
"""


def test_memory_is_bounded_for_many_numbers_of_rows() -> None:
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) < 30  # MiB; without a bound on the compiled kernels, about 200
