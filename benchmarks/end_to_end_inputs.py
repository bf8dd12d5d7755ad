"""The inputs of `end_to_end`: a model that knows the form of the answers, data sets and settings.

The model is the tiny one (`actors/trainer/tiny`), warmed up on conversations with random answers
and guesses; `sums` trains SmolLM2-135M-Instruct. `benchmarks/peers/end_to_end_tasks.py` has every
family's rewards and tools.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worlds.models.forms_warmup import warmed_up

from actors.environment.function_tools import load_tools
from actors.trainer.tiny.warmup import Conversation

TASKS = "benchmarks.peers.end_to_end_tasks"
SUMS = Path(__file__).parents[1] / "docs" / "examples" / "addition" / "addition.jsonl"
GUESSES = 4
ROWS = 112


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A data set and a reward, and possibly a class of tools."""

    rows: Sequence[dict[str, Any]]
    """Prompts with the columns that the reward needs."""
    reward: str
    tools: str | None = None
    turn_tokens: int
    """Maximum number of sampled tokens in a turn."""
    max_turns: int = 1
    goals: Mapping[str, float]
    """Goal for the ratio of a side's samples a second to TRL's, by side."""
    has_tiny_model: bool = True
    """Whether the tiny model is trained; otherwise SmolLM2-135M-Instruct."""
    group_size: int = 16
    """Number of answers for each of a step's 16 prompts."""
    learning_rate: float = 6e-4
    warmup_updates: int = 20
    peer_rows: int | None = None
    """Number of rows that TRL trains at once; None for all rows of a step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of our side."""
    settings_by_lag: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings of our side, by lag."""

    @property
    def max_tokens(self) -> int:
        """Return the limit for all turns and answers of tools together, as TRL counts them."""
        return self.turn_tokens if self.tools is None else (self.turn_tokens + 8) * self.max_turns

    def write(self, file: Path) -> None:
        """Write at least ROWS chats as JSONL; rows are repeated if there are fewer."""
        lines = []
        for number in range(max(ROWS, len(self.rows))):
            row = self.rows[number % len(self.rows)]
            chat = [{"role": "user", "content": row["prompt"]}]
            lines.append(json.dumps({**row, "prompt": chat, "task_id": f"t{number}"}))
        file.write_text("\n".join(lines) + "\n")


TINY_GOALS = {"ours_lag_0": 2.5, "ours_lag_1": 2.5}
FAMILIES = {
    # Answers of two tokens.
    "after": Family(
        rows=[
            {"prompt": f"Which number comes after {number}?", "answer": str(number + 1)}
            for number in range(1, 8)
        ],
        reward="after",
        turn_tokens=16,
        goals={"ours_lag_0": 2.0, "ours_lag_1": 2.0},
    ),
    # Answers of some fifty tokens, of different lengths.
    "count": Family(
        rows=[{"prompt": f"Count from 1 to {upto}.", "upto": upto} for upto in range(9, 25)],
        reward="count",
        turn_tokens=96,
        goals=TINY_GOALS,
    ),
    # Calls of 18 tokens, one for each guess, and a last word.
    "game": Family(
        rows=[
            {"prompt": "Guess my number from 1 to 8.", "secret": secret} for secret in range(1, 9)
        ],
        reward="found",
        tools="Game",
        turn_tokens=32,
        max_turns=GUESSES + 1,
        goals={"ours_lag_0": 4.0, "ours_lag_1": 4.0},
    ),
    # `make demo`: sums of two numbers, scored by the last number of an answer, also of one that was
    # cut off. In bfloat16, for which the CPU should have instructions (AMX or AVX-512).
    "sums": Family(
        rows=[json.loads(line) for line in SUMS.read_text(encoding="utf-8").splitlines()],
        reward="right",
        turn_tokens=24,
        goals={"ours_lag_0": 8.0, "ours_lag_1": 10.0},
        has_tiny_model=False,
        group_size=8,
        learning_rate=1e-5,
        warmup_updates=5,
        peer_rows=32,
        settings={
            "inference.enforce_eager": True,
            "model.dtype": "bfloat16",
            "trainer.dtype": "bfloat16",
            "rollouts.outcomes.truncated_tokens.disposition": "score",
        },
        # With lag 0, engine and trainer take turns on both cores.
        settings_by_lag={0: {"trainer.threads": 2, "inference.threads": 2}},
    ),
}


def build_model(directory: Path) -> Path:
    """Build the initial policy of all sides and families, and return its directory."""
    (game,) = load_tools([f"{TASKS}:Game"])
    kinds = (_after, _count, _game_of([tool.schema for tool in game.tools]))

    def conversation(dice: random.Random) -> Conversation:
        return dice.choice(kinds)(dice)

    policy: Path = warmed_up(directory, conversation, steps=150, per_step=16)
    return policy


def _after(dice: random.Random) -> Conversation:
    question = f"Which number comes after {dice.randint(1, 7)}?"
    return Conversation(messages=(("user", question), ("assistant", str(dice.randint(1, 9)))))


def _count(dice: random.Random) -> Conversation:
    upto = dice.randint(9, 24)
    said = " ".join(str(dice.randint(1, 24)) for _ in range(dice.randint(4, 24)))
    return Conversation(messages=(("user", f"Count from 1 to {upto}."), ("assistant", said)))


def _game_of(tools: Sequence[Any]) -> Callable[[random.Random], Conversation]:
    def game(dice: random.Random) -> Conversation:
        secret = dice.randint(1, 8)
        messages = [("user", "Guess my number from 1 to 8.")]
        for _ in range(GUESSES):
            guess = dice.randint(1, 8)
            call = json.dumps({"name": "guess", "arguments": {"number": guess}})
            messages.append(("assistant", f"<tool_call>{call}</tool_call>"))
            if guess == secret:
                messages.append(("tool", "correct"))
                break
            messages.append(("tool", "higher" if guess < secret else "lower"))
        messages.append(("assistant", "done"))
        return Conversation(messages=tuple(messages), tools=tuple(tools))

    return game
