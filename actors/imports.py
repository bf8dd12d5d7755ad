"""Imports of large packages: torch, transformers, vLLM."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """No garbage collection within, nor later one that visits what is there at the end.

    Packages make a million objects that never die. Visiting them over and over takes a fifth of
    the time that `import vllm` takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
