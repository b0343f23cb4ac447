"""A process to attack: it idles, and holds a secret in its memory, environment and open files.

Usage: `victim.py secret path`. Prints the address of the secret, and the descriptor of the opened path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

secret = ctypes.create_string_buffer(sys.argv[1].encode())
print(ctypes.addressof(secret), os.open(sys.argv[2], os.O_RDONLY), flush=True)
signal.pause()
