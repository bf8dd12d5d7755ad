"""A run whose steps are merged, journaled and trained by the real parts, in this process.

The trajectories are sampled from the run's own model, so their log-probabilities are those that an
engine reports; faults are planted in some of them before the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.journal.files import write_file
from actors.merge.groups import classify_groups
from actors.merge.journal import journal_step
from actors.merge.step import StepResult, build_step
from actors.network import LOOPBACK
from actors.trainer.process_group import open_store
from actors.trainer.rank import TrainerRank
from actors.trainer.statistics import StepStats
from actors.types import Sample, Trajectory
from service.config.file import dump_config, parse_config
from service.config.tree import Config
from service.launch.model_directories import build_tiny
from service.launch.run_dir import RunDir
from service.store.run_store import RunStore
from service.telemetry.records import StageSeconds, step_record
from worlds.builders.store_builders import commit
from worlds.builders.trajectory_builders import make_trajectory, make_turn

_PROMPT = "<|user|>Guess my number from 1 to {}. You have {} guesses.<|end|><|assistant|>"
MAX_REPLY = 12
Groups = list[tuple[Trajectory, ...]]


def config_of(model: str | None = None, **sections: dict[str, Any]) -> Config:
    """Return a configuration of the guessing game with one rank.

    model: its path; None: the run builds a tiny model. sections: settings that override these.
    """
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "explained"},
        "model": {"path": model} if model else {"tiny": {"warmup_steps": 20}},
        "tasks": {"environment": "guessing"},
        "trainer": {"num_ranks": 1, "learning_rate": 1e-3, "warmup_updates": 0},
    }
    tree["model"]["max_context_tokens"] = 256
    for name, keys in sections.items():
        tree.setdefault(name, {}).update(keys)
    return parse_config(tree, source="for a test")


@dataclass(kw_only=True)
class PlayedRun:
    """A run that is played step by step: `step` merges, journals, trains and records one."""

    run_dir: RunDir
    config: Config
    model: Path
    """The model from which training starts."""
    rank: TrainerRank
    store: RunStore
    term: int
    stats: list[StepStats] = field(default_factory=list)

    def step(self, groups: Groups, *, saves: bool = False) -> StepResult:
        number = len(self.stats) + 1
        settings = self.config.step_settings(shape=self.rank.shape)
        version = self.rank.version
        result = build_step(
            classify_groups(groups, settings), settings, step=number, trainer_version=version
        )
        written = journal_step(
            result, term=self.term, max_policy_age=0, group_rule=self.config.group_rule
        )
        self.run_dir.journal.mkdir(exist_ok=True)
        write_file(self.run_dir.journal, written)
        stats = self.rank.train_step(result.shards[0])
        self.stats.append(stats)
        record = step_record(
            number,
            result.report,
            stats,
            version=version + 1,
            stages=StageSeconds(),
        )
        self.store.add_step(record, term=self.term, new_events=[])
        if saves:
            directory = self.rank.save(number, self.term)
            commit(self.store, term=self.term, step=number, directory=directory.name)
        return result

    @property
    def grad_norm(self) -> float:
        """The norm of the last step's gradient, before clipping."""
        return self.stats[-1].statistics["grad_norm"]


@contextmanager
def played_run(directory: Path, config: Config) -> Iterator[PlayedRun]:
    """Begin a run without steps; close it and its process group at the end of the block.

    Another run needs a process group of its own, and there can be only one at a time.
    """
    run_dir = RunDir(path=directory)
    run_dir.path.mkdir()
    run_dir.config_file.write_text(dump_config(config))
    if config.model.tiny is not None:
        build_tiny(run_dir.tiny_model, config.model.tiny)
    model = config.model.path or str(run_dir.tiny_model)
    settings = config.rank_settings(model=model, checkpoint_dir=run_dir.checkpoints)
    meeting = open_store(LOOPBACK, num_ranks=1, timeout_s=60)
    rank, store = TrainerRank(settings, rank=0, store=meeting), RunStore(run_dir.database_url)
    try:
        term = store.acquire_lease(owner="a:1", directory=str(run_dir.path)).term
        yield PlayedRun(
            run_dir=run_dir,
            config=config,
            model=Path(model),
            rank=rank,
            store=store,
            term=term,
        )
    finally:
        store.close()
        rank.close()


@torch.no_grad()
def sampled_groups(
    model: Path, *, num_groups: int, group_size: int, seed: int, version: int = 0
) -> Groups:
    """Sample first replies to prompts of the guessing game; each group has one prompt.

    The returns are 0 or 1 at random.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    # Numbers of one digit, so that all prompts have the same length.
    chats = [_PROMPT.format(*rng.integers(3, 10, 2)) for _ in range(num_groups)]
    ids = torch.tensor(
        [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    ).repeat_interleave(group_size, 0)
    num_prompt, end = ids.shape[1], tokenizer.convert_tokens_to_ids("<|end|>")
    columns = []
    for _ in range(MAX_REPLY):
        known = torch.log_softmax(causal_lm(ids).logits[:, -1], -1)
        token = torch.multinomial(known.exp(), 1, generator=generator)
        columns.append(known.gather(1, token))
        ids = torch.cat([ids, token], 1)
    logprobs = torch.cat(columns, 1).clamp(max=0.0).tolist()
    rows = ids.tolist()

    def trajectory(group: int, member: int) -> Trajectory:
        row = group * group_size + member
        reply = rows[row][num_prompt:]
        length = reply.index(end) + 1 if end in reply else MAX_REPLY
        turn = make_turn(
            rows[row][:num_prompt],
            reply[:length],
            logprobs=logprobs[row][:length],
            reward=float(rng.random() < 0.5),
            version=version,
        )
        return make_trajectory([turn], rollout_id=f"g{group:06d}.0-{member}")

    return [
        tuple(trajectory(group, member) for member in range(group_size))
        for group in range(num_groups)
    ]


Poison = Callable[[Trajectory, Path], Trajectory]


def rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """Return the trajectory with another reward."""
    (sample,) = trajectory.samples
    (turn,) = sample.turns
    changed = msgspec.structs.replace(turn, reward=reward)
    return replace(trajectory, samples=(replace(sample, turns=(changed,)),))


def wrong_reward(trajectory: Trajectory, model: Path) -> Trajectory:
    """Reward a trajectory with -100, as a broken grader would; valid returns are 0 and 1."""
    return rewarded(trajectory, -100.0)


@torch.no_grad()
def rewarded_garbage(trajectory: Trajectory, model: Path) -> Trajectory:
    """Replace the reply by random tokens with a return of 3.

    Their log-probabilities are those that the policy gives them.
    """
    (sample,) = trajectory.samples
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng = np.random.default_rng(trajectory.group_number)
    ids, num_prompt = sample.token_ids.copy(), sample.prompt_length
    ids[num_prompt:] = rng.integers(5, 500, len(ids) - num_prompt)
    tensor = torch.from_numpy(ids.astype(np.int64))
    known = torch.log_softmax(causal_lm(tensor[None]).logits[0, :-1], -1)
    logprobs = sample.logprobs.copy()
    logprobs[1:] = known.gather(1, tensor[1:, None])[:, 0].numpy()
    logprobs[:num_prompt] = 0
    garbage = replace(sample, token_ids=ids, logprobs=logprobs)
    return rewarded(replace(trajectory, samples=(garbage,)), 3.0)


def wrong_logprobs(trajectory: Trajectory, model: Path) -> Trajectory:
    """Make a lost game whose log-probabilities were recorded 3 nats too low: its ratios are e^3."""
    (sample,) = trajectory.samples
    logprobs = np.where(sample.mask == 1, sample.logprobs - 3.0, 0.0).astype(np.float32)
    low: Sample = replace(sample, logprobs=logprobs)
    return rewarded(replace(trajectory, samples=(low,)), 0.0)


POISONS: Sequence[Poison] = (wrong_reward, rewarded_garbage, wrong_logprobs)


def poisoned(groups: Groups, model: Path, *, count: int) -> tuple[Groups, set[str]]:
    """Poison one trajectory in each of `count` groups, with the kinds of poison in turn.

    Returns: all groups, and the ids of the poisoned trajectories.
    """
    found, names = [list(group) for group in groups], set()
    for number in range(count):
        group = number * (len(groups) // count)
        member = (7 * number) % len(found[group])
        spoilt = POISONS[number % len(POISONS)](found[group][member], model)
        found[group][member] = spoilt
        names.add(spoilt.trajectory_id)
    return [tuple(group) for group in found], names
