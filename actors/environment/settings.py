"""What an environment actor is told. Plain values, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen

from actors.limits import STRICT, Fraction, Natural, NotNegative, Positive, Seconds, Temperature
from actors.outcomes import OutcomeRule
from actors.trajectory_queue.settings import ExchangeSettings
from actors.types import Outcome

# The name of the option that has an environment score the answers of a group together.
GROUP_REWARD = "group_reward"
# Groups after which a mixture's pattern comes again: weights are kept to a thousandth.
MIXTURE_PERIOD = 1000
StopStrings = Annotated[tuple[Annotated[str, MinLen(1), MaxLen(256)], ...], MaxLen(16)]
Choices = Annotated[tuple[str, ...], MinLen(1)]


class History(StrEnum):
    """What stands in a prompt of what was said before."""

    APPENDED = "appended"
    """What was sampled, token by token."""
    AS_RENDERED = "as_rendered"
    """What the chat template makes of it, as where the model is used later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How episodes are played, and what becomes of those that fail."""

    __pydantic_config__ = STRICT

    num_actors: Positive = 1
    """Environment actor processes."""
    slots_per_actor: Positive = 256
    """Episodes that one actor holds at once."""
    max_turns: Positive = 8
    """Model calls in one trajectory."""
    max_tokens_per_turn: Positive = 64
    """Sampled tokens in one turn."""
    temperature: Temperature = 1.0
    """Of training rollouts; evaluations have their own (evaluation.temperature)."""
    stop: StopStrings = ()
    """Texts that end a turn: the turn ends at the first of them that it contains. The environment
    gets the text before it; all sampled tokens are trained."""
    turn_deadline_s: Seconds = 60
    """One model call and the environment's answer to it; also the environment's reset."""
    episode_deadline_s: Seconds = 600
    """One trajectory, from reset to the end."""
    frozen_after_s: Seconds = 60
    """An environment actor that answers nothing for as long is replaced."""
    outcomes: dict[Outcome, OutcomeRule] = field(default_factory=dict)
    """Rows of the outcome table that differ here."""
    max_failed_groups: Positive = 32
    """Groups in a row without enough usable rollouts that end the run."""
    failed_groups_grace_s: NotNegative = 30
    """Such a row is borne for as long, whatever its length."""
    workers: Positive = 64
    """Maximum number of processes in which one actor calls reward functions and tools. As many more
    may hold the instances of tool classes, and as many more your own environments. Processes are
    started when calls need them."""
    worker_memory_mib: Natural = 4096
    """Memory in MiB that a worker process may use beyond that of its imported modules; 0 means no
    limit."""
    inline: bool = False
    """Whether the actor calls functions, tools and your own environments in its own process instead
    of in workers. Use it only for fast code that cannot hang."""
    reward_limit_s: Seconds = 20
    """Limit of one call of a reward function in a worker. The wait for a worker does not count."""
    max_calls_per_turn: Positive = 8
    """Maximum number of tool calls that are answered in one turn. A turn with more is malformed."""
    parallel_calls: bool = False
    """Whether the tool calls of a turn run concurrently. In a worker, the calls of one instance
    still run one after the other."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """For the chat template, such as enable_thinking: false."""
    history: History = History.APPENDED
    """appended: earlier replies stay as they were sampled; as_rendered: as the template shows them,
    with a new sample for each turn whose history that changes."""


playing: ContextVar[RolloutSettings] = ContextVar("playing", default=RolloutSettings())  # noqa: B039
"""The settings of the rollout being played in the current context; the defaults if none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the sampled text. Exactly one field is set; vLLM's parameters have the same
    names."""

    __pydantic_config__ = STRICT

    json: dict[str, Any] | None = None
    """A JSON schema that the text satisfies."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Choices | None = None
    """The allowed texts."""
    grammar: str | None = None
    """A grammar in EBNF that the text follows."""

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that are not null, by name."""
        choice = None if self.choice is None else list(self.choice)
        named = {"json": self.json, "regex": self.regex, "choice": choice, "grammar": self.grammar}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Which tokens may be sampled.

    In training every token may be sampled: the engine's log-probabilities are over the kept tokens,
    and would not match the trainer's, which are over all tokens.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tasks of an evaluation are sampled, and which samples pass."""

    num_samples: int = 1
    """Of each task."""
    temperature: float = 0.0
    kept: KeptTokens = field(default_factory=KeptTokens)
    pass_reward: float = 1.0
    """The return with which a sample passes; the scaled one, where that is known."""
    ks: tuple[int, ...] = (1,)
    """Of pass@k, each at most num_samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """Leave out for a while what is solved, and what is out of reach."""

    __pydantic_config__ = STRICT

    pass_reward: float = 1.0
    """A sample passes with so much of its return or more, in parts of the best possible one where
    the environment knows that."""
    solved_from: Fraction = 1.0
    """A task rests when as large a share of its samples passed."""
    hopeless_to: Fraction = 0.0
    """And when no larger share did."""
    resting_share: Fraction = 1.0
    """The chance with which a resting one is played all the same; 1: there is no curriculum."""
    window: Positive = 2
    """The share is over so many of its newest groups."""

    @property
    def is_on(self) -> bool:
        return self.resting_share < 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEnvironment:
    """An environment, and how it is played."""

    environment: str
    """Its registered name, or package.module:Class."""
    options: Mapping[str, Any] = field(default_factory=dict)
    rollouts: RolloutSettings | None = None
    """Its limits; None: the actor's own."""

    @property
    def scores_groups(self) -> bool:
        """Whether the environment's method `score_group` is called for each group, once all
        rollouts of the group have ended."""
        return bool(self.options.get(GROUP_REWARD))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentActorSettings:
    """What every environment actor of a run is told."""

    rollouts: RolloutSettings
    environments: Mapping[str, PlayedEnvironment]
    """By the name that their tasks have as `environment`."""
    max_context_tokens: int
    """Prompt and reply together, as the engine allows."""
    chat_template: str | None
    """The chat template: Jinja text, or the word "none" for raw prompts. None means the tokenizer's
    own template."""
    groups_per_step: int
    keeps_last_observation: bool = False
    """As `play_episode`: on where a critic bootstraps what was cut off."""
    num_steps: int = 0
    """Number of training steps of the run; 0 if nothing is trained."""
    exchange: ExchangeSettings = field(default_factory=ExchangeSettings)
