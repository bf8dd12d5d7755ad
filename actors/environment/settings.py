"""The settings of an environment actor. They are plain values, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen

from actors.limits import STRICT, Fraction, Natural, NotNegative, Positive, Seconds, Temperature
from actors.outcomes import OutcomeRule
from actors.types import Outcome

# The name of the option that makes an environment score the answers of a group together.
GROUP_REWARD = "group_reward"
# Number of groups after which the order of the sources in a mixture repeats, so that weights are
# exact to a thousandth.
MIXTURE_PERIOD = 1000
StopStrings = Annotated[tuple[Annotated[str, MinLen(1), MaxLen(256)], ...], MaxLen(16)]
Choices = Annotated[tuple[str, ...], MinLen(1)]
History = Literal["appended", "as_rendered"]
"""How earlier turns appear in a prompt. appended: as the sampled tokens, unchanged. as_rendered: as
the chat template renders them, which is what applications of the trained model will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of the rollouts: environment actors, limits, and the handling of failures."""

    __pydantic_config__ = STRICT

    num_actors: Positive = 1
    """Number of environment actors; each is a process."""
    slots_per_actor: Positive = 256
    """Maximum number of episodes that one actor plays at once."""
    max_turns: Positive = 8
    """Maximum number of model calls in one trajectory."""
    max_tokens_per_turn: Positive = 64
    """Maximum number of sampled tokens in one turn."""
    temperature: Temperature = 1.0
    """Temperature of training rollouts; evaluations have their own (evaluation.temperature)."""
    stop: StopStrings = ()
    """Strings that end a turn: a turn ends at the first stop string in its text. The environment
    gets the text before the stop string; all sampled tokens are trained."""
    turn_deadline_s: Seconds = 60
    """Seconds that one model call and the environment's step after it may take together; also the
    limit of the environment's reset."""
    episode_deadline_s: Seconds = 600
    """Seconds that one trajectory may take, from its reset to its end."""
    frozen_after_s: Seconds = 60
    """Seconds without an answer after which an environment actor is replaced."""
    outcomes: dict[Outcome, OutcomeRule] = field(default_factory=dict)
    """The treatment of trajectories, by outcome; an outcome without an entry has its default."""
    max_failed_groups: Positive = 32
    """The run ends after this many groups in a row that had too few usable rollouts to be
    trained."""
    failed_groups_grace_s: NotNegative = 30
    """Seconds for which groups must have failed in a row before the run ends, however many
    failed."""
    workers: Positive = 64
    """Maximum number of processes in which one actor calls reward functions and tools. In
    addition, up to this number of processes hold instances of tool classes, and up to this number
    hold your own environments. Processes are started when calls need them."""
    worker_memory_mib: Natural = 4096
    """Memory in MiB that a worker process may use beyond that of its imported modules; 0 means no
    limit."""
    inline: bool = False
    """Whether the actor calls functions, tools and your own environments in its own process instead
    of in workers. Use it only for fast code that cannot hang."""
    reward_limit_s: Seconds = 20
    """Seconds that one call of a reward function in a worker may take, without the wait for a
    worker."""
    max_calls_per_turn: Positive = 8
    """Maximum number of tool calls that are answered in one turn. A turn with more calls is
    malformed."""
    parallel_calls: bool = False
    """Whether the tool calls of a turn run concurrently. In a worker, the calls of one instance
    still run one after the other."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template, such as enable_thinking: false."""
    history: History = "appended"
    """appended: earlier replies stay as sampled; as_rendered: as the template shows them, with a
    new sample for each turn whose history the template changes."""


rollout_settings: ContextVar[RolloutSettings] = ContextVar(
    "rollout_settings",
    default=RolloutSettings(),  # noqa: B039
)
"""The settings of the rollout being played in the current context; outside of a rollout, the
default settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the sampled text. Exactly one field is set; the names are vLLM's."""

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
        """The constraints that are set, by their names."""
        choice = None if self.choice is None else list(self.choice)
        named = {"json": self.json, "regex": self.regex, "choice": choice, "grammar": self.grammar}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The tokens that an evaluation may sample; the defaults allow every token.

    In training, every token is allowed. With limits, the engine normalises log-probabilities over
    the allowed tokens only. The trainer normalises over all tokens, so the trainer could not use
    the engine's log-probabilities.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    structured_outputs: StructuredOutputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling settings of an evaluation, and the lowest return that counts as a pass."""

    num_samples: int = 1
    """Number of samples of each task."""
    temperature: float = 0.0
    kept: KeptTokens = field(default_factory=KeptTokens)
    pass_reward: float = 1.0
    """The lowest return with which a sample passes. If the best possible return is known, a
    sample's return is divided by the best possible return first."""
    ks: tuple[int, ...] = (1,)
    """Values of k for pass@k, each at most num_samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """Settings of the curriculum: solved and hopeless tasks rest, so they are played less often."""

    __pydantic_config__ = STRICT

    pass_reward: float = 1.0
    """The smallest return with which a sample passes; as a share of the best possible return, if
    the best possible return is known."""
    solved_from: Fraction = 1.0
    """A task rests if at least this share of its samples passed."""
    hopeless_to: Fraction = 0.0
    """A task also rests if at most this share of its samples passed."""
    resting_share: Fraction = 1.0
    """The probability that a task is played although it rests; 1: no curriculum."""
    window: Positive = 2
    """The share of passed samples is taken over this number of the task's newest groups."""

    @property
    def is_on(self) -> bool:
        return self.resting_share < 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """An environment with its options and limits."""

    environment: str
    """The environment's registered name, or package.module:Class."""
    options: Mapping[str, Any]
    rollouts: RolloutSettings | None = None
    """The settings of the environment's rollouts; None: `EnvironmentActorSettings.rollouts` are
    used."""

    @property
    def scores_groups(self) -> bool:
        """Whether the environment's method `score_group` is called for each group.

        The call is made once all rollouts of the group have ended.
        """
        return bool(self.options.get(GROUP_REWARD))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentActorSettings:
    """The settings of every environment actor of a run."""

    rollouts: RolloutSettings
    environments: Mapping[str, EnvironmentSettings]
    """The environments, each under the name that its tasks have in `Task.environment`."""
    max_context_tokens: int
    """The engine's limit on the number of tokens in prompt and reply together."""
    chat_template: str | None
    """The chat template: Jinja text, or the word "none" for raw prompts. None means the tokenizer's
    own template."""
    groups_per_step: int
    keeps_last_observation: bool = False
    """Whether to append the next prompt's new tokens to the sample, as far as they fit into the
    context, if that prompt leaves no room for a reply. A critic values a cut-off episode by these
    tokens."""
    num_steps: int = 0
    """Number of training steps of the run; 0 if nothing is trained."""
