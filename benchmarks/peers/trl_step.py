"""Run TRL 1.16.0's GRPOTrainer in its own environment, one training step for each command.

Each line of the input is a command; `step` lets the trainer make its next optimiser step and
answers with a line of JSON. Completions are read from a file through `rollout_func`, so nothing is
generated. The time that the trainer needs to accept, score and pad the completions is measured and
subtracted from its step. Of the documented options, those that are fast on a CPU are used: no
gradient checkpointing, no KL term, no logging, the fused optimiser, the caller's number of rows at
once. The module imports nothing of Rayloom.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from typing import Any

# ruff: noqa: E402
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
answers = os.fdopen(os.dup(1), "w")
# The output of the libraries goes to standard error.
os.dup2(2, 1)

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # not installed here
    """A trainer that records each step's losses, its gradient norm and the time for completions."""

    aside: tuple[float, ...] = (0.0, 0.0)
    losses: tuple[float, ...] = ()
    grad_norm = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        wall_s, cpu_s = clocks()
        made = super()._generate_and_score_completions(inputs)
        now_s, now_cpu_s = clocks()
        self.aside = (now_s - wall_s, now_cpu_s - cpu_s)
        return made

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        self.losses = (*self.losses, float(loss))
        return loss

    def _get_grad_norm(self, *arguments: Any, **named: Any) -> Any:
        norm = super()._get_grad_norm(*arguments, **named)
        self.grad_norm = float(norm)
        return norm


class OneStepAtATime(TrainerCallback):  # type: ignore[misc]
    """A callback that waits for a command before each step, and answers after the step."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer
        self.started = (0.0, 0.0)

    def on_train_begin(self, *_: Any, **named: Any) -> None:
        gc.freeze()
        print(json.dumps("ready"), file=answers, flush=True)

    def on_step_begin(self, *_: Any, **named: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.trainer.losses, self.trainer.aside = (), (0.0, 0.0)
        gc.collect()
        self.started = clocks()

    def on_step_end(self, *_: Any, **named: Any) -> None:
        ended = clocks()
        trainer = self.trainer
        wall_s, cpu_s = (
            b - a - less for a, b, less in zip(self.started, ended, trainer.aside, strict=True)
        )
        entropies = trainer._metrics["train"].pop("entropy")
        answer = {
            "seconds": {"wall_s": wall_s, "cpu_s": cpu_s},
            "loss": sum(trainer.losses),
            "grad_norm": trainer.grad_norm,
            "entropy": sum(entropies) / len(entropies),
        }
        print(json.dumps(answer), file=answers, flush=True)


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def rollouts_of(path: str) -> Any:
    """Return a rollout_func that returns the completions of group k for the prompt "k"."""
    found = np.load(path)
    size = int(found["group_size"])
    prompts, completions = found["prompts"].tolist(), found["completions"].tolist()
    masks, rewards = found["masks"].tolist(), found["rewards"].tolist()

    def roll_out(texts: list[str], trainer: Any) -> dict[str, Any]:
        seen: dict[str, int] = {}
        rows = []
        for text in texts:
            member = seen.get(text, 0)
            seen[text] = member + 1
            rows.append(int(text) * size + member)
        return {
            "prompt_ids": [prompts[row] for row in rows],
            "completion_ids": [completions[row] for row in rows],
            "logprobs": [[0.0] * len(completions[row]) for row in rows],
            "env_mask": [masks[row] for row in rows],
            "gain": [rewards[row] for row in rows],
        }

    return roll_out, len(prompts), size


def reward(completions: list[Any], gain: list[float], **named: Any) -> list[float]:
    return gain


def main() -> None:
    """Train, one step for each command, until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("completions", help="file of the benchmark")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--output", required=True)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    roll_out, num_rows, group_size = rollouts_of(options.completions)
    num_groups = num_rows // group_size
    config = GRPOConfig(
        output_dir=options.output,
        use_cpu=True,
        bf16=options.dtype == "bfloat16",
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=num_rows // options.rows,
        num_generations=group_size,
        max_completion_length=len(np.load(options.completions)["completions"][0]),
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        temperature=1.0,
        learning_rate=1e-12,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        max_steps=10_000,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    pace = OneStepAtATime()
    pace.trainer = TimedTrainer(
        model=options.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(k) for k in range(num_groups)] * 1000}),
        rollout_func=roll_out,
        callbacks=[pace],
    )
    pace.trainer.train()


if __name__ == "__main__":
    main()
