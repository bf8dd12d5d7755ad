"""Measure the peak memory of the loss at a large vocabulary: `python -m benchmarks.loss_memory`.

The benchmark computes the log-probabilities and entropies of 8,192 trained tokens from their hidden
states, the policy loss, and its backward pass to the hidden states and the output head. It does so
once without and once with an entropy bonus, each in a separate process. The peak is the maximum
growth of the process (VmHWM minus VmRSS before), including the gradients; the memory counted in
tensors is also shown. Both are given as a share of the full logits in float32. The benchmark prints
one line of JSON, and exits with 1 if the share exceeds a quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from actors.algorithm import LossSettings
from actors.trainer.logprobs import token_logprobs
from actors.trainer.loss.micro_batch import MicroBatchTerms, micro_batch_loss
from actors.trainer.settings import LOGPROB_CHUNK
from benchmarks.environment import describe_environment
from benchmarks.live_memory import LiveMemory
from benchmarks.pairs import time_once

GOAL = 0.25


def backward_of_loss(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    targets: torch.Tensor,
    *,
    settings: LossSettings,
    chunk_tokens: int,
) -> None:
    """Compute the loss from hidden states, and the loss's gradients, with the trainer's own code.

    hidden: [T, H], for the hidden size H. targets: [T] ids of the trained tokens.
    """
    logprobs, entropies = token_logprobs(
        hidden,
        head,
        targets,
        chunk_tokens=chunk_tokens,
        has_entropy_gradient=settings.needs_entropy_gradient,
    )
    wave = torch.linspace(-1.0, 1.0, len(targets))
    terms = MicroBatchTerms(
        current_logprobs=logprobs,
        behaviour_logprobs=logprobs.detach() + 0.1 * wave,
        entropies=entropies,
        advantages=wave,
        loss_weights=torch.full_like(wave, 1 / len(targets)),
        trajectory_index=torch.zeros_like(targets),
        sampled_versions=torch.zeros_like(targets),
        trainer_version=0,
    )
    micro_batch_loss(terms, settings).loss.backward()


def measure_here(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one loss in this process, which has done nothing else, and return the numbers."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    settings = LossSettings(entropy_coefficient=0.01 if options.entropy else 0.0)
    head = torch.nn.Linear(options.hidden, options.vocabulary, bias=False)
    hidden = torch.randn(options.tokens, options.hidden, requires_grad=True)
    targets = torch.randint(options.vocabulary, (options.tokens,))
    chunk_tokens = options.chunk or LOGPROB_CHUNK
    # Threads and kernels allocate their own memory at first use.
    backward_of_loss(hidden[:8], head, targets[:8], settings=settings, chunk_tokens=8)
    head.zero_grad()
    hidden.grad = None
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    counted = LiveMemory()
    with counted:
        seconds = time_once(
            lambda: backward_of_loss(
                hidden, head, targets, settings=settings, chunk_tokens=chunk_tokens
            )
        )
    grown = status_bytes("VmHWM") - before
    full = 4 * options.tokens * options.vocabulary
    return {
        "peak_bytes": grown,
        "share": round(grown / full, 4),
        "tensor_bytes": counted.peak_bytes,
        "tensor_share": round(counted.peak_bytes / full, 4),
        "full_logits_bytes": full,
        "chunk_tokens": chunk_tokens,
        "wall_s": round(seconds.wall_s, 2),
    }


def status_bytes(name: str) -> int:
    """Return the value of a line of /proc/self/status in bytes; in the file it is in kibibytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"benchmark: /proc/self/status has no {name}; this benchmark needs Linux")


def main() -> int:
    """Measure both losses, each in a separate process, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=8192, help="trained tokens")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, help="tokens at once; default: the trainer's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--entropy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options)))
        return 0
    command = [sys.executable, "-m", "benchmarks.loss_memory", *sys.argv[1:], "--here"]
    cases = {"policy_loss": command, "with_entropy_gradient": [*command, "--entropy"]}
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    measured = {
        name: json.loads(
            subprocess.run(each, check=True, stdout=subprocess.PIPE, env=environment).stdout
        )
        for name, each in cases.items()
    }
    result = {
        "benchmark": "loss_memory",
        "vocabulary": options.vocabulary,
        "trained_tokens": options.tokens,
        "hidden": options.hidden,
        **measured,
        "goal": GOAL,
        **describe_environment("torch"),
        "threads": options.threads,
    }
    print(json.dumps(result))
    return int(any(each["share"] >= GOAL for each in measured.values()))


if __name__ == "__main__":
    sys.exit(main())
