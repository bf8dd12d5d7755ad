"""Check a configuration against the machine, before anything starts.

Every check raises ConfigError with what was wrong, got, expected and the remedy. Reads files and
the tokenizer, plays no game, starts no process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import psutil

from actors.environment.registry import (
    BadEnvironmentOptions,
    UnknownEnvironment,
    resolve,
)
from service.config import Config
from service.config_file import ConfigError
from service.task_source import open_tasks

GIB = 1 << 30
RESET_LIMIT_S = 60.0


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


def check_prompt(config: Config, model_path: str) -> None:
    """The environment begins an episode, and its first prompt leaves room for an answer."""
    from transformers import AutoTokenizer

    from actors.environment.rendering import ChatRenderer, RenderError

    try:
        make_environment = resolve(config.tasks.environment, config.tasks.options)
    except (UnknownEnvironment, BadEnvironmentOptions, ImportError) as error:
        raise ConfigError(f"tasks.environment: {error}") from error
    task = open_tasks(config).task(0)

    async def first_observation() -> object:
        environment = make_environment()
        try:
            return await asyncio.wait_for(environment.reset(task), RESET_LIMIT_S)
        finally:
            await environment.close()

    try:
        observation = asyncio.run(first_observation())
    except TimeoutError:
        raise ConfigError(
            f"tasks.environment: {config.tasks.environment!r} did not begin task {task.task_id!r} "
            f"within {RESET_LIMIT_S:.0f} s; look at its reset"
        ) from None
    except Exception as error:  # the environment is the user's own code: any type can come
        raise ConfigError(
            f"tasks.environment: {config.tasks.environment!r} could not begin task "
            f"{task.task_id!r}: {type(error).__name__}: {error}; mend the task or the environment"
        ) from error
    try:
        renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_path))
        prompt = renderer.first_prompt(observation.messages, observation.tools)  # type: ignore[attr-defined]
    except (RenderError, OSError, ValueError) as error:
        raise ConfigError(f"model: its chat template cannot render a prompt: {error}") from error
    _check_room(config, len(prompt))


def _check_room(config: Config, num_prompt: int) -> None:
    room = config.model.max_context_tokens - num_prompt
    if room < config.rollouts.max_tokens_per_turn:
        raise ConfigError(
            f"the first prompt has {num_prompt} tokens and an answer may take "
            f"{config.rollouts.max_tokens_per_turn} (rollouts.max_tokens_per_turn); expected both "
            f"within model.max_context_tokens ({config.model.max_context_tokens}); raise that, "
            "or shorten the prompt or the answer"
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
