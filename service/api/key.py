"""The bearer key: taken out of the environment once, kept as a digest."""

from __future__ import annotations

import ctypes
import os
from hashlib import sha256

KEY_VARIABLE = "RAYLOOM_API_KEY"


def digest_of(key: str) -> str:
    """SHA-256 of a key, hexadecimal: the key itself is kept nowhere."""
    return sha256(key.encode()).hexdigest()


def take_key() -> str | None:
    """The key of this process's environment, which holds it no longer; None where it held none.

    Whatever is started later inherits the environment, and an environment of the user's runs code
    of its own. Also written over where it lies, which is what Linux shows in /proc/PID/environ.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if place := libc.getenv(KEY_VARIABLE.encode()):
        ctypes.memset(place, ord("x"), len(os.fsencode(key)))
    del os.environ[KEY_VARIABLE]
    return key
