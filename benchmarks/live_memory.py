"""Count the bytes of all tensors that are alive at once; the result is the same in every run.

While the counter is active, each storage that one of torch's operators makes counts until it is
freed, also in backward passes of the same thread. Memory that a kernel allocates internally is not
counted.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """A counter, as a context manager that is active while it is entered.

    live_bytes: bytes of the tensors that are alive now. peak_bytes: the maximum of live_bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outside = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if is_tensor(leaf):
                self._enter(leaf, outside)
        return result

    def _enter(self, tensor: Tensor, outside: set[int]) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or address in outside:
            return
        self._known.add(address)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._leave, address, storage.nbytes())

    def _leave(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= num_bytes


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)
