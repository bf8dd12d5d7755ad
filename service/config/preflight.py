"""Check a configuration against the machine, before anything starts.

Every check raises ConfigError with what was wrong, got, expected and the remedy. Reads files and
the tokenizer, begins one task, starts no process.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil

from service.config.file import ConfigError
from service.config.prompt_check import check_prompt
from service.config.tree import Config

GIB = 1 << 30


def check_before_start(config: Config, *, model_path: str) -> None:
    """Run every check. model_path: where the model's files are (the tiny model is built).

    Raises: ConfigError.
    """
    check_model(config, model_path)
    check_prompt(config, model_path)
    check_memory(config)
    check_gpus(config)
    check_metrics_port(config)


def check_model_source(path: str) -> None:
    """Whether `path` is a model directory or a hub name that can be had. Raises: ConfigError."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()
    if not looks_local:
        _check_hub_name(path)
        return
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"model.path: {path} is not there; expected a directory in Hugging Face format or a "
            "hub name such as Qwen/Qwen3-0.6B; build a small one with `rayloom model tiny DIR`"
        )
    missing = [
        name for name in ("config.json", "tokenizer.json") if not (directory / name).exists()
    ]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"model.path: {path} lacks {', '.join(missing)}; expected a complete model in "
            "Hugging Face format; export a checkpoint with `rayloom export`"
        )


def _check_hub_name(name: str) -> None:
    from transformers import AutoConfig  # two seconds of import that a local path does not need

    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path: {name!r} is no directory here and cannot be had from the hub "
            f"({first_line}); expected an existing directory or a reachable hub name"
        ) from None


def check_model(config: Config, model_path: str) -> None:
    """The model can hold the context that the run asks for."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return
    longest = json.loads(file.read_text()).get("max_position_embeddings")
    if isinstance(longest, int) and config.model.max_context_tokens > longest:
        raise ConfigError(
            f"model.max_context_tokens is {config.model.max_context_tokens}, expected at most the "
            f"model's own {longest} positions; lower it or choose another model"
        )


def check_memory(config: Config) -> None:
    """Engines' caches and the queue fit into this machine (CPU runs only)."""
    if config.inference.gpus_per_replica > 0:
        return
    total_gib = psutil.virtual_memory().total / GIB
    wanted_gib = (
        config.inference.num_replicas * config.inference.kv_cache_gib + config.queue.max_mib / 1024
    )
    if wanted_gib > 0.8 * total_gib:
        raise ConfigError(
            f"the engines' caches ({config.inference.num_replicas} x "
            f"inference.kv_cache_gib {config.inference.kv_cache_gib:g}) and queue.max_mib "
            f"({config.queue.max_mib}) ask for {wanted_gib:.1f} GiB, expected at most 80% of this "
            f"machine's {total_gib:.1f} GiB; lower them"
        )


def check_gpus(config: Config) -> None:
    """A local run has the GPUs that it asks for (a cluster is asked once it is joined)."""
    wanted = gpus_wanted(config)
    if wanted == 0:
        return
    import torch

    found = torch.cuda.device_count()
    if wanted > found:
        raise ConfigError(
            f"the run asks for {wanted:g} GPUs ({config.inference.num_replicas} engines x "
            f"{config.inference.gpus_per_replica:g} and {config.trainer.num_ranks} ranks x "
            f"{config.trainer.gpus_per_rank:g}), found {found}; lower them, use a CPU "
            "configuration, or join a cluster with --address"
        )


def gpus_wanted(config: Config) -> float:
    return (
        config.inference.num_replicas * config.inference.gpus_per_replica
        + config.trainer.num_ranks * config.trainer.gpus_per_rank
    )


def check_metrics_port(config: Config) -> None:
    """The metrics port is free, where a fixed one is asked for."""
    if config.metrics.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.metrics.host, config.metrics.port))
        except OSError as error:
            raise ConfigError(
                f"metrics.port: {config.metrics.host}:{config.metrics.port} cannot be opened "
                f"({os.strerror(error.errno or 0)}); expected a free port; set another, or 0 for "
                "any free one"
            ) from None
