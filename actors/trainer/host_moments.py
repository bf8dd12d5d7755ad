"""AdamW that keeps its moments in the memory of the machine between two updates.

An update copies the moments of one parameter to its device, computes AdamW there, and copies the
moments back. So the device holds the moments of one parameter at a time. The result is bitwise
equal to the result of `torch.optim.AdamW`. On the CPU nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import StateDict

_NAMES = ("exp_avg", "exp_avg_sq", "step")


class HostMomentsAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with its moments in pinned memory of the machine."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, and keep the moments on the host.

        torch's own method puts them on the device of the parameters, so they are moved back.
        """
        super().load_state_dict(state_dict)
        for parameter in self.state:
            self.move_to_host(parameter)

    def move_to_host(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        for name in _NAMES:
            state[name] = _on_host(state[name])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. closure: not supported."""
        assert closure is None, "an optimiser with moments on the host was given a closure"
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own, gradient = _local(parameter), _local(parameter.grad)
                held = [_local(self.state[parameter][name]) for name in _NAMES]
                moved = [each.to(own.device, non_blocking=True) for each in held]
                mean, square, count = moved
                adamw(
                    [own],
                    [gradient],
                    [mean],
                    [square],
                    [],
                    [count],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for old, new in zip(held, moved, strict=True):
                    if old is not new:
                        old.copy_(new, non_blocking=True)
                devices.add(own.device)
        for device in devices:
            # Wait until the device has made the copies to the host.
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned memory. Of a sharded tensor, only this rank's shard moves."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if local.device.type == "cpu":
            return tensor
        # `DTensor.from_local` would move the shard to the mesh's device.
        return DTensor(_on_host(local), tensor._spec, requires_grad=False)
    return tensor if tensor.device.type == "cpu" else tensor.cpu().pin_memory()
