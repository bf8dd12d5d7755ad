"""Run TRL 1.16.0's GRPOTrainer from the command to the last step, in its own environment.

The module writes the token ids of every row's prompt (prompts.json), and a line of JSON after each
step (steps.jsonl): Unix seconds, the mean reward of its completions, their number, and the seconds
of generation and rewards. Of the documented options, those that are fast on a CPU are used: no KL
term and no reference, all rows of a step at once if memory allows, one update for each generation,
no gradient checkpointing, no second forward pass for old log-probabilities, the fused optimiser.
The module imports nothing of Rayloom.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# vLLM's engine in this process, as TRL requires.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# The tiny model writes calls in Qwen's form; TRL does not know its template.
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # not installed here
    """A trainer that measures the seconds of generation and rewards of each step."""

    collect_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        scored = super()._generate_and_score_completions(inputs)
        self.collect_s += time.perf_counter() - began
        return scored


class EachStep(TrainerCallback):  # type: ignore[misc]  # not installed here
    """A callback that writes a line after each step."""

    def __init__(self, file: Path) -> None:
        self.file = file.open("w")
        self.trainer: TimedTrainer

    def on_step_end(self, *_: Any, **named: Any) -> None:
        metrics = self.trainer._metrics["train"]
        line = {
            "time": time.time(),
            "reward": sum(metrics["reward"]) / len(metrics["reward"]),
            "samples": self.trainer.args.generation_batch_size,
            "collect": self.trainer.collect_s,
            "tokens": sum(metrics["completions/mean_length"]),
            **{
                name: sum(found)
                for name in ("tools/call_frequency", "tools/failure_frequency")
                if (found := metrics.get(name))
            },
        }
        metrics.clear()
        self.trainer.collect_s = 0.0
        print(json.dumps(line), file=self.file, flush=True)


def load(file: str) -> Any:
    """Return the module with the rewards and tools, loaded from its file."""
    spec = importlib.util.spec_from_file_location("tasks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tasks"] = module
    spec.loader.exec_module(module)
    return module


def engine_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of one of TRL's three ways to generate."""
    if name == "vllm":
        return {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": 512,
            "vllm_importance_sampling_correction": False,
            "vllm_gpu_memory_utilization": options.memory_share,
            "generation_kwargs": {"max_tokens": options.turn_tokens},
        }
    settings: dict[str, Any] = {"generation_kwargs": {"max_new_tokens": options.turn_tokens}}
    if name == "paged":
        settings["use_transformers_continuous_batching"] = True
    return settings


def config_of(options: argparse.Namespace) -> GRPOConfig:
    num_rows = options.groups * options.group_size
    at_once = options.rows or num_rows
    return GRPOConfig(
        output_dir=options.output,
        seed=options.seed,
        use_cpu=True,
        bf16=options.autocast,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=num_rows // at_once,
        num_generations=options.group_size,
        max_completion_length=options.max_tokens,
        max_tool_calling_iterations=options.max_turns - 1,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        temperature=1.0,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup_updates,
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_epsilon=1e-5,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=options.steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **engine_of(options.engine, options),
    )


def main() -> None:
    """Train, and write the prompts and the steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("dataset", help="JSONL")
    parser.add_argument("tasks", help="Python file of rewards and tools")
    parser.add_argument("reward", help="a function of that file")
    parser.add_argument("--tools", help="a class of that file")
    parser.add_argument("--engine", choices=("generate", "paged", "vllm"), default="generate")
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--turn-tokens", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--max-turns", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--warmup-updates", type=int, required=True)
    parser.add_argument("--rows", type=int, help="rows trained at once, by default all of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--memory-share", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tasks = load(options.tasks)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.response_template = RESPONSES
    each = EachStep(Path(options.output) / "steps.jsonl")
    dataset = Dataset.from_json(options.dataset)
    each.trainer = TimedTrainer(
        model=options.model,
        reward_funcs=getattr(tasks, options.reward),
        args=config_of(options),
        train_dataset=dataset,
        processing_class=tokenizer,
        environment_factory=getattr(tasks, options.tools) if options.tools else None,
        callbacks=[each],
    )
    if not options.tools:
        prompts = each.trainer._tokenize_prompts(list(dataset["prompt"]))[0]
        (Path(options.output) / "prompts.json").write_text(json.dumps(prompts))
    each.trainer.train()


if __name__ == "__main__":
    main()
