"""Padded step-wise rows as one side: `python -m benchmarks.side_padded MODEL SHAPE`.

The commands `padded float32`, `padded bfloat16` and `sorted float32` name the layout of the rows
and the data type of the computation. With bfloat16, this is torch's autocast over float32 weights.
"""

from __future__ import annotations

import argparse
import gc

import torch
from transformers import AutoModelForCausalLM

from actors.trainer.process_group import keep_freed_memory
from benchmarks.padded_step import accumulate, padded_batches, sorted_batches, turn_rows
from benchmarks.pairs import time_once
from benchmarks.side import StepTaken, serve
from benchmarks.side_ours import LEARNING_RATE
from benchmarks.train_inputs import UpdateShape, make_trajectories

MAX_GRAD_NORM = 1.0
LAYOUTS = {"padded": padded_batches, "sorted": sorted_batches}


def main() -> None:
    """Make a step for each command until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("shape", help="of the update, as JSON")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    rows = turn_rows(make_trajectories(UpdateShape.from_json(options.shape)))
    # Padding is made once, outside of the measured time.
    batches = {
        name: list(lay_out(rows, rows_at_once=options.rows)) for name, lay_out in LAYOUTS.items()
    }
    gc.freeze()

    def step(command: str) -> StepTaken:
        layout, dtype = command.split()
        numbers: list[float] = []

        def work() -> None:
            loss = accumulate(model, batches[layout], dtype=getattr(torch, dtype))
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            numbers.extend([loss, float(norm)])

        seconds = time_once(work)
        return StepTaken(seconds=seconds, loss=numbers[0], grad_norm=numbers[1])

    serve(step)


if __name__ == "__main__":
    main()
