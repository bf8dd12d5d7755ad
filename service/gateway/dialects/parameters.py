"""What becomes of each name in a client's body, as data: read, without effect, or refused.

The documentation walks these tables too. A name that stands in none is refused, and null is no
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """What a parameter of a body does."""

    READ = "read"
    NONE = "none"
    """Any value is taken and changes nothing: the run decides, or there is nothing to decide."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What becomes of one name in a body."""

    effect: Effect
    note: str
    """How it is read; why it has no effect; why it is refused, or what to do instead."""
    harmless: tuple[object, ...] = ()
    """Values of a refused parameter that ask for nothing, and are taken."""
    is_ignorable: bool = False
    """A refused parameter without which the answer has the same form: `sessions.unsupported:
    ignore` takes it and counts it."""


Parameters = Mapping[str, Parameter]


def taken(note: str) -> Parameter:
    return Parameter(effect=Effect.READ, note=note)


def without_effect(note: str) -> Parameter:
    return Parameter(effect=Effect.NONE, note=note)


def refused(note: str, *harmless: object) -> Parameter:
    return Parameter(effect=Effect.REFUSED, note=note, harmless=harmless)


def ignorable(note: str, *harmless: object) -> Parameter:
    """One that is refused, or ignored and counted, as `sessions.unsupported` says."""
    return Parameter(effect=Effect.REFUSED, note=note, harmless=harmless, is_ignorable=True)


BOOKKEEPING = "nothing is billed, stored or cached by it"
TRAINED = "the policy does as it is trained to"
UNCONSTRAINED = "what is sampled is not constrained; say in a message what is wanted"
OWN_PROBABILITIES = "the policy's own probabilities are sampled; leave it out"
SHOWN_TOKENS = "let the session show its tokens when it is made"
OWN_TEMPLATE = "the run's own chat template is trained"
TEXT_ALONE = "the policy reads and writes text alone"
IN_THE_CLIENT = "tools run in the client; declare a function"

MODEL = taken("any text; `:auxiliary` at its end marks a call that is no part of the task")
MAX_TOKENS = taken("at least 1; the session's own limit holds beside it")
STREAM = taken("the answer is sampled whole, then sent as events")
STOP = taken(
    "what is shown ends before the first of these texts; what was sampled is trained whole. They "
    "are not looked for in thoughts and calls"
)

COMMON: Parameters = {
    "model": MODEL,
    "stream": STREAM,
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "seed"),
        without_effect("the run decides how is sampled"),
    ),
    "presence_penalty": ignorable(OWN_PROBABILITIES, 0),
    "frequency_penalty": ignorable(OWN_PROBABILITIES, 0),
    "repetition_penalty": ignorable(OWN_PROBABILITIES, 1),
    **dict.fromkeys(
        ("metadata", "user", "store", "service_tier", "safety_identifier", "cache_control"),
        without_effect(BOOKKEEPING),
    ),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        without_effect(BOOKKEEPING),
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        ignorable(UNCONSTRAINED),
    ),
    "chat_template": refused(OWN_TEMPLATE),
    "chat_template_kwargs": taken(
        "options of the chat template, as enable_thinking; a part of the conversation, as tools are"
    ),
    "logit_bias": ignorable(UNCONSTRAINED, {}),
    "logprobs": refused(SHOWN_TOKENS, False),
    "top_logprobs": refused(SHOWN_TOKENS, 0),
    "moderation": ignorable("there is none"),
}
"""In every dialect: clients of one provider are pointed at another's routes."""
