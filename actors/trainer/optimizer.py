"""AdamW over sharded parameters: warm-up, global clipping, and state that exists from the start.

Invariant: the state's shapes and its step counts do not depend on whether an update has happened,
so a checkpoint taken before the first update resumes exactly. Called by `TrainerRank`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from actors.trainer.settings import TrainerSettings


def learning_rate_at(num_updates: int, *, learning_rate: float, warmup_updates: int) -> float:
    """Return the rate of the update that follows `num_updates` applied ones.

    rate = learning_rate min(1, (num_updates + 1) / warmup_updates).

    Example: rates of 1.0 warmed up over 4: .25, .5, .75, 1, 1, …
    """
    if warmup_updates <= 0:
        return learning_rate
    return learning_rate * min(1.0, (num_updates + 1) / warmup_updates)


def build_optimizer(parameters: Iterable[Parameter], trainer: TrainerSettings) -> torch.optim.AdamW:
    """Make AdamW with its moments present and its step counts at zero.

    torch would make the state at the first update, and its checkpointing would run an update of
    its own to have some: a run resumed from before the first update would then correct its biases
    one step too early.
    """
    optimizer = torch.optim.AdamW(
        list(parameters),
        lr=trainer.learning_rate,
        betas=trainer.betas,
        eps=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return this rank's shards of the gradients, those that are not empty."""
    shards: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if shard.numel():
            shards.append(shard)
    return shards


def squared_norm(shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return the sum of squares over this rank's shards, a float64 scalar."""
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(list(shards)))
    return norms.double().square().sum()


def clip_gradients(shards: Sequence[Tensor], *, grad_norm: float, max_grad_norm: float) -> None:
    """Scale every rank's shards so that the global norm is at most `max_grad_norm`."""
    if grad_norm > max_grad_norm:
        torch._foreach_mul_(list(shards), max_grad_norm / grad_norm)
