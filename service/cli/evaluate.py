"""`rayloom evaluate`: play a configuration's held-out tasks with a checkpoint or a model.

The command uses the parts of a run except the queue and the trainer: the engines load the weights
from a weight board, and environment actors play the tasks. All parts run on this machine, and end
with the command.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from pydantic import TypeAdapter
from ray.actor import ActorHandle
from ray.exceptions import RayError
from transformers import AutoModelForCausalLM

from actors.algorithm import AlgorithmSettings
from actors.deadline import ActorLost
from actors.environment.evaluation import EvaluationSet, Played, plays_of
from actors.environment.policy import PolicyUnavailable
from actors.file_targets import regular_target
from actors.trainer.publish import pack_weights
from actors.trainer.settings import TrainerSettings
from actors.weights.board import WeightError, WeightGroup
from service import units
from service.cli.artifacts import checkpoint_of, export_to
from service.cli.outlet import Stages, say, warn
from service.cli.train import EXIT_FAILED, EXIT_OK
from service.config.file import ConfigError
from service.config.preflight import check_with_model, check_without_model
from service.config.sections import MetricsSettings
from service.config.tasks import open_sets, open_tasks
from service.config.tree import Config
from service.launch.cluster import joined
from service.launch.run_dir import RunDir, model_path
from service.launch.signals import EXIT_INTERRUPTED, StopSignals
from service.run.actor_pool import (
    EnvironmentPool,
    evaluation_idle_s,
    play_evaluation,
    start_environment_actor,
    write_lines,
)
from service.run.engines import Engines, board_handle
from service.run.start import engine_settings
from service.telemetry.evaluation import evaluation_record
from service.telemetry.records import EvaluationRecord

# Constant, because the command's own Ray has no other run.
RUN_ID, TERM = "rayloom-evaluate", 1
LOOK_S = 0.2
# Long, because the board copies each buffer.
PUBLISH_LIMIT_S = 600.0
_RECORD = TypeAdapter(EvaluationRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """The model whose weights play the tasks."""

    label: str
    """Name of the checkpoint or of the model."""
    model: str
    """Model directory or hub name, in Hugging Face format."""
    step: int = 0
    version: int = 0


def run_evaluate(
    config: Config,
    signals: StopSignals,
    stages: Stages,
    *,
    run: Path | None,
    checkpoint: str | None,
    uses_model: bool,
    set_name: str,
    num_tasks: int | None,
    out: Path | None,
) -> int:
    """Play the tasks, print the results, write the rollouts, and return the exit code.

    run: the run's directory; None if the user named a configuration instead.
    checkpoint: a checkpoint's name in the run, or a checkpoint's directory. If None, the run's
    newest checkpoint plays. If `run` is None too, the configured model plays.
    uses_model: play the configured model, whatever `run` and `checkpoint` are.
    set_name: a name in evaluation.sets; empty for the run's own held-out tasks.
    num_tasks: number of tasks to play, from the beginning of the set; None plays all.
    Raises: ConfigError if the arguments are refused; KeyboardInterrupt if a signal arrives. Both
    are raised only before any part of the evaluation starts.
    """
    signals.check()
    name, config = config.run.name, _without_trainer(config)
    stages.next("reading rows")
    # Early, without the checks that need the model's tokenizer.
    _chosen_set(config, set_name, num_tasks)
    directory = None if uses_model else _checkpoint(run, checkpoint)
    out = _out(out, run, name if directory is None else directory.name)
    with tempfile.TemporaryDirectory(prefix="rayloom-evaluate-") as scratch:
        if directory is not None:
            # Check the model that will play.
            config = _with_model(config, str(Path(scratch) / "model"))
        stages.next("exporting the checkpoint" if directory else "looking for the model")
        policy = _policy(config, RunDir(path=Path(scratch)), directory)
        stages.next("checking the model and the prompts")
        observations = check_without_model(config, tell=warn)
        check_with_model(
            config,
            observations,
            model_path=policy.model,
            was_loaded=directory is not None,
            tell_template=warn,
        )
        played_set = _chosen_set(config, set_name, num_tasks, model_path=policy.model)
        stages.next("starting Ray")
        # A signal during Ray's start takes effect after it.
        signals.hold()
        with joined(config, address=None):
            signals.install()
            # Serve's messages for developers are in its own log files.
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            try:
                return _play_and_report(config, policy, played_set, out, signals, stages)
            finally:
                # Only Ray's end remains, which another signal would interrupt.
                signals.ignore()


def _without_trainer(config: Config) -> Config:
    """Return the configuration without the settings that only training reads."""
    if not config.has_environment:
        raise ConfigError(
            "tasks.environment is session, which only external agents can play; expected an "
            "environment; name one"
        )
    return replace(
        config,
        trainer=replace(TrainerSettings(), num_ranks=0),
        algorithm=AlgorithmSettings(),
        inference=replace(config.inference, weight_backend="object_store"),
        metrics=MetricsSettings(),
    )


def _with_model(config: Config, path: str) -> Config:
    return replace(config, model=replace(config.model, path=path, tiny=None))


def _chosen_set(
    config: Config, set_name: str, num_tasks: int | None, *, model_path: str | None = None
) -> EvaluationSet:
    tasks = open_tasks(config, model_path=model_path)
    sets = {each.name: each for each in open_sets(config, tasks, model_path=model_path)}
    if (found := sets.get(set_name)) is None and config.mixture:
        raise ConfigError(
            "the parts of a mixture are evaluated one by one, expected --on with one of: "
            f"{', '.join(sets) or 'none has held-out tasks'}"
        )
    if found is None:
        raise ConfigError(
            "tasks.evaluation_tasks is 0, so no task is held out; name one of evaluation.sets with "
            f"--on: {', '.join(sets) or 'there is none'}; or add --set tasks.evaluation_tasks=N to "
            "play N tasks, on which the run may have trained"
        )
    if (num_tasks or 0) > len(found.tasks):
        raise ConfigError(
            f"--tasks {num_tasks}: expected at most {len(found.tasks)}, the size of the "
            "set; play fewer, or raise tasks.evaluation_tasks (without an evaluation_split the "
            "added tasks are training tasks, and a run may already have trained on them)"
        )
    return replace(found, tasks=found.tasks[:num_tasks])


def _checkpoint(run: Path | None, name: str | None) -> Path | None:
    """Return the directory of the checkpoint that plays; None if the configured model plays."""
    if name is None:
        return None if run is None else checkpoint_of(run, command="evaluate")
    named = Path(name)
    if run is not None and not named.is_dir():
        named = RunDir(path=run).checkpoints / name
    return checkpoint_of(named, command="evaluate")


def _out(named: Path | None, run: Path | None, label: str) -> Path:
    """Return the file for the rollouts, after checking that it can be written."""
    file = Path(f"evaluate-{label}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    out = named or file
    try:
        if named is None and run is not None:
            out = RunDir(path=run).evaluations / file
            out.parent.mkdir(exist_ok=True)
        if not os.access(regular_target(out).parent, os.W_OK):
            raise PermissionError(f"no file can be written in {out.parent}")
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {error.strerror or error}; expected a regular file in a directory that "
            "exists and can be written; name another"
        ) from error
    return out


def _policy(config: Config, scratch: RunDir, checkpoint: Path | None) -> _Policy:
    """Return the model that plays the tasks, in a form that engines can load.

    checkpoint: is exported to `config.model.path`, a temporary directory of the caller; None if the
    configured model plays. scratch: the place of a tiny model.
    """
    if checkpoint is None:
        model = model_path(config, scratch)
        return _Policy(label=config.model.path or "the tiny model", model=model)
    assert config.model.path is not None
    progress = export_to(
        checkpoint,
        Path(config.model.path),
        dtype=config.model.dtype,
        command="evaluate",
    )
    return _Policy(
        label=checkpoint.name,
        model=config.model.path,
        step=progress.step,
        version=progress.version,
    )


def _dtype(config: Config) -> torch.dtype:
    found: torch.dtype = getattr(torch, config.model.dtype.value)
    return found


def _play_and_report(
    config: Config,
    policy: _Policy,
    played_set: EvaluationSet,
    out: Path,
    signals: StopSignals,
    stages: Stages,
) -> int:
    sampling = played_set.sampling
    try:
        signals.check()
        playing = _play(config, policy, played_set, out, stages)
        played = asyncio.run(_unless_stopped(playing, signals))
        stages.end()
        record = evaluation_record(
            policy.step,
            [each.summary for each in played],
            version=policy.version,
            sampling=sampling,
            name=played_set.name,
            is_scheduled=False,
        )
    except KeyboardInterrupt:
        say("rayloom: the evaluation was interrupted", err=True)
        return EXIT_INTERRUPTED
    except (ActorLost, PolicyUnavailable, WeightError, RayError, OSError) as error:
        say(f"rayloom: the evaluation failed: {error}", err=True)
        return EXIT_FAILED
    of_set = f" of {record.name}" if record.name else ""
    say(
        f"{policy.label}, version {record.policy_version}: {units.plural(record.num_tasks, 'task')}"
        f"{of_set}, {units.plural(record.num_samples, 'sample')} each at temperature "
        f"{record.temperature:g}\n\n{table(record)}\n"
    )
    line = {"policy": policy.label, **_RECORD.dump_python(record, mode="json"), "file": str(out)}
    say(json.dumps(line))
    missing = len(played_set.tasks) * sampling.num_samples - len(played)
    if record.reward_mean is None or missing:
        first = next((each.summary.detail for each in played if each.summary.detail), "")
        say(
            f"rayloom: the evaluation failed: {missing} rollouts are missing and "
            f"{record.num_failed} have failed{f'; the first: {first}' if first else ''}",
            err=True,
        )
        return EXIT_FAILED
    return EXIT_OK


async def _play(
    config: Config, policy: _Policy, played_set: EvaluationSet, out: Path, stages: Stages
) -> list[Played]:
    """Start engines and actors, play the set, write the rollouts, and end the engines and actors.

    Raises: PolicyUnavailable, ActorLost, WeightError, RayError; OSError if the writing fails.
    """
    engines = Engines(
        engine_settings(config, model=policy.model),
        run_id=RUN_ID,
        orphan_timeout_s=config.run.orphan_timeout_s,
        has_api=False,
    )
    actors: dict[str, ActorHandle] = {}
    tasks, sampling = played_set.tasks, played_set.sampling
    try:
        stages.next("deploying the engines")
        await engines.open_term(TERM, resources={})
        stages.next(f"starting engines with {policy.label}, version {policy.version}")
        for number in range(config.num_environment_actors):
            actor_id = f"{EnvironmentPool.id_prefix}-{TERM}-{number}"
            actors[actor_id] = start_environment_actor(
                config,
                actor_id=actor_id,
                model=policy.model,
                make_policy=engines.make_policy,
                queue=None,
                resources={},
            )
        groups = await asyncio.to_thread(_put_weights, policy.model, dtype=_dtype(config))
        board = board_handle(engines.board, deadline_s=PUBLISH_LIMIT_S)
        await board.publish(TERM, policy.version, groups)
        await engines.wait_ready()
        status = await engines.status()
        for replica in () if status is None else status.replicas:
            for name, seconds in replica.stages:
                stages.ended(name, seconds)
        rollouts = plays_of(tasks, sampling.num_samples)
        stages.next(f"playing {len(rollouts)} rollouts of {len(tasks)} tasks")
        played = await play_evaluation(
            actors,
            rollouts,
            sampling,
            idle_s=evaluation_idle_s(config),
            keeps_tokens=True,
            notice=lambda text: say(f"rayloom: {text}", err=True),
        )
        # Write before the actors end, because their objects in the object store end with them.
        await asyncio.to_thread(write_lines, out, played)
        return played
    finally:
        for actor in actors.values():
            ray.kill(actor)
        await engines.stop()


def _put_weights(model: str, *, dtype: torch.dtype) -> list[WeightGroup]:
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    packed = pack_weights(causal_lm, dtype=dtype, is_kept=True)
    return [replace(group, buffer=ray.put(group.buffer)) for group in packed]


async def _unless_stopped(
    work: Coroutine[Any, Any, list[Played]], signals: StopSignals
) -> list[Played]:
    """Await the work. After a signal, cancel it, await its cleanup, and raise KeyboardInterrupt."""
    working = asyncio.create_task(work)
    while not working.done():
        await asyncio.wait({working}, timeout=LOOK_S)
        if signals.is_asked and not working.done():
            working.cancel()
            await asyncio.wait({working})
    signals.check()
    return working.result()


def table(record: EvaluationRecord) -> str:
    """Return the results of an evaluation, one number in each line.

    Example: avg@4       0.550 ± 0.102
             pass@1      0.550
    """
    n, error = record.num_samples, record.standard_error
    mean = "unknown" if record.best_known_reward is None else f"{record.best_known_reward:.3f}"
    rows = [(f"avg@{n}", mean + ("" if error is None else f" ± {error:.3f}"))]
    rows += [(f"pass@{k}", f"{value:.3f}") for k, value in sorted(record.pass_at.items())]
    if record.majority_mean is not None:
        rows.append((f"majority@{n}", f"{record.majority_mean:.3f}"))
    rows.append(("rollouts", str(sum(record.outcomes.values()))))
    if record.num_failed:
        rows.append(("failed", str(record.num_failed)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
