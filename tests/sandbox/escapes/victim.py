"""A process for hostile processors to attack: it does nothing, and holds a secret in its memory, environment and files.

Usage: `victim.py secret path`. Prints where in its memory the secret is, and with which descriptor it opened the path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

secret = ctypes.create_string_buffer(sys.argv[1].encode())
print(ctypes.addressof(secret), os.open(sys.argv[2], os.O_RDONLY), flush=True)
signal.pause()
