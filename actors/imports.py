"""Imports of large packages: torch, transformers, vLLM."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn off garbage collection within the block, so that imports of large packages are faster.

    Large packages create a million objects that exist until the process ends. Repeated collections
    of these objects take a fifth of the time of `import vllm`. At the end of the block all existing
    objects are exempted from later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
