"""Measure a rank's memory if it trains all weights, trains only adapters, recomputes activations,
or frees gathered weights after each micro-batch.

    python -m benchmarks.rank_memory MODEL

Each side is a separate process, which starts the only rank of a run, makes two steps and writes a
checkpoint. Peaks of the process's memory (VmHWM) are reported for the start, the second step and
the checkpoint, and the memory that is left when the allocator has returned what it had freed. The
benchmark prints one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from actors.trainer.settings import LoraSettings
from benchmarks.environment import describe_environment
from benchmarks.loss_memory import status_bytes
from benchmarks.side_ours import make_shard, num_tokens_of, start_rank, train
from benchmarks.train_inputs import UpdateShape, make_trajectories, weigh

SHAPE = UpdateShape(prompt=128, turns=1, sampled=48, observed=0, groups=1, group_size=8)
SIDES = ("all_weights", "adapters", "recomputed", "resharded")


def measure_here(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one side in this process, which has done nothing else, and return the numbers."""
    vocabulary = AutoConfig.from_pretrained(options.model).vocab_size
    shape = replace(SHAPE, groups=options.groups)
    weighted = weigh(make_trajectories(shape, vocabulary=vocabulary))
    shard = make_shard(weighted, budget=options.budget)
    imported = status_bytes("VmRSS")
    lora = LoraSettings(rank=options.rank) if side == "adapters" else None
    with tempfile.TemporaryDirectory() as directory:
        rank = start_rank(
            options.model,
            Path(directory),
            num_threads=options.threads,
            lora=lora,
            gradient_checkpointing=side == "recomputed",
            reshard_between_micro_batches=side == "resharded",
        )
        start_peak = status_bytes("VmHWM")
        train(rank, shard)
        clear_peak()
        started = time.perf_counter()
        train(rank, shard)
        step_s, step_peak = time.perf_counter() - started, status_bytes("VmHWM")
        clear_peak()
        rank.save(2, 1)
        save_peak = status_bytes("VmHWM")
        ctypes.CDLL(None).malloc_trim(0)
        left = status_bytes("VmRSS")
        rank.close()
    return {
        "imported_bytes": imported,
        "start_peak_bytes": start_peak,
        "step_peak_bytes": step_peak,
        "save_peak_bytes": save_peak,
        "left_bytes": left,
        "step_s": round(step_s, 2),
        "num_tokens": num_tokens_of(shard),
    }


def clear_peak() -> None:
    """Set the process's peak of memory (VmHWM) to the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Measure every side in a separate process, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--groups", type=int, default=SHAPE.groups, help="of 8 samples each")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help="measure only this side")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure_here(options.side, options)))
        return
    command = [sys.executable, "-m", "benchmarks.rank_memory", *sys.argv[1:], "--side"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    measured = {
        side: json.loads(
            subprocess.run(
                [*command, side], check=True, stdout=subprocess.PIPE, env=environment
            ).stdout.splitlines()[-1]
        )
        for side in SIDES
    }
    result = {
        "benchmark": "rank_memory",
        "model": Path(options.model).name,
        "rank": options.rank,
        **measured,
        **describe_environment("torch", "transformers"),
        "threads": options.threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
