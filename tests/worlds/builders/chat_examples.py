"""Journal steps whose chats are made with the tiny tokenizer and the real chat renderer."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from actors.environment.protocol import Message, Role
from actors.environment.rendering import ChatRenderer
from actors.journal.files import JournalStep
from actors.trainer.tiny.tokenizer import TURN_END, build_tokenizer
from actors.types import Outcome, Trajectory, Turn
from service.inspect.token_text import TokenText, text_by
from worlds.builders.journal_builders import one_group, step_of
from worlds.builders.trajectory_builders import make_trajectory, make_turn

ASK = "Guess my number from 1 to 7. You have 3 guesses."


@lru_cache(1)
def tokenizer() -> Any:
    return build_tokenizer()


@lru_cache(1)
def text() -> TokenText:
    return text_by(tokenizer(), template_options={})


def ids_of(words: str) -> list[int]:
    return [int(token) for token in tokenizer().encode(words, add_special_tokens=False)]


def first_prompt(words: str = ASK) -> np.ndarray:
    message = Message(role=Role.USER, content=words)
    return ChatRenderer(tokenizer()).first_prompt([message], [])


def next_prompt(turn: Turn, answer: str) -> np.ndarray:
    """Return the prompt that follows a turn, made by appending an answer to its tokens.

    The renderer adds the missing end token to a reply that was cut off.
    """
    message = Message(role=Role.USER, content=answer)
    extension = ChatRenderer(tokenizer()).extend(
        turn.prompt_token_ids, turn.sampled_token_ids, history=[], new_messages=[message], tools=[]
    )
    return extension.prompt_token_ids


def turn_of(prompt: np.ndarray, reply: str, *, version: int = 0, **fields: Any) -> Turn:
    sampled = ids_of(reply)
    logprobs = [-0.1 * (index + 1) for index in range(len(sampled))]
    fields = {"logprobs": logprobs, **fields}
    return make_turn(prompt.tolist(), sampled, version=version, **fields)


def game(member: int, replies: list[str], *, reward: float, **fields: Any) -> Trajectory:
    """Return a game that answers each reply with "higher" and rewards the last one."""
    turns: list[Turn] = []
    prompt = first_prompt()
    for index, reply in enumerate(replies):
        is_last = index == len(replies) - 1
        turn = turn_of(
            prompt,
            reply,
            reward=reward if is_last else 0.0,
            reward_components={"hit": reward} if is_last else {},
        )
        turns.append(turn)
        prompt = next_prompt(turn, "higher")
    return make_trajectory(turns, rollout_id=f"g000003.0-{member}", **fields)


def example_step() -> JournalStep:
    """Return a step of four games: won, lost with a reply cut off, branched, and masked."""
    won = game(0, [f"4{TURN_END}", f"6{TURN_END}"], reward=1.0, best_return=1.0)
    # The first reply lacks its end token: the renderer inserts one, which is not trained.
    lost = game(1, ["3", f"5{TURN_END}"], reward=0.0, outcome=Outcome.MAX_TURNS)
    return step_of([one_group([won, lost, branched(2), cut_off(3)])])


def branched(member: int) -> Trajectory:
    """Return a trajectory whose second prompt spells the first reply with other tokens.

    The second turn therefore begins a new sample.
    """
    first = turn_of(first_prompt(), f"higher{TURN_END}", logprobs=[-0.5, -0.25])
    respelled = [*first_prompt().tolist(), *ids_of("h"), *ids_of("igher"), *ids_of(TURN_END)]
    second = make_turn(
        [*respelled, *ids_of("<|user|>no<|end|><|assistant|>")], ids_of(f"7{TURN_END}"), reward=1.0
    )
    return make_trajectory([first, second], rollout_id=f"g000003.0-{member}")


def cut_off(member: int) -> Trajectory:
    """Return a trajectory whose only turn is masked and has tokens that are parts of characters.

    The bytes of such a token are not valid UTF-8 without those of its neighbours.
    """
    turn = turn_of(first_prompt("Wie heißt <b>das</b> & \x1b[31m?"), "größer 🙂")
    return make_trajectory(
        [turn],
        rollout_id=f"g000003.0-{member}",
        outcome=Outcome.TRUNCATED_TOKENS,
        detail="the turn was cut off after 8 tokens",
    )


def with_trained(step: JournalStep, row: int, positions: list[int]) -> JournalStep:
    """Return the step with further trained positions in the first sample of a trajectory."""
    entry = step.entries[row]
    sample, *others = entry.trajectory.samples
    versions = sample.versions.copy()
    versions[positions] = 0
    planted = replace(sample, versions=versions)
    advantages = np.full(planted.num_trained, entry.advantages[0][0])
    changed = replace(
        entry,
        trajectory=replace(entry.trajectory, samples=(planted, *others)),
        advantages=(advantages, *entry.advantages[1:]),
    )
    entries = list(step.entries)
    entries[row] = changed
    return replace(step, entries=tuple(entries))
