"""Load a reward function that scores answers a second time, such as that of audit.shadow."""

from __future__ import annotations

from actors.environment.reward_functions import (
    EXTRAS,
    BadRewardFunction,
    RewardFunction,
    load_functions,
    load_group_functions,
)
from actors.user_code import describe
from service.config.file import ConfigError


def load_shadow(
    name: str, *, key: str = "audit.shadow", scores_groups: bool = False
) -> RewardFunction:
    """Return the reward function of a name. Raises: ConfigError if it cannot be loaded.

    key: the setting or option that names the function, for messages. scores_groups: whether the
    function has to score the answers of a group together.
    """
    try:
        found = (load_group_functions if scores_groups else load_functions)(name)[0]
    except BadRewardFunction as error:
        problem = str(error).removeprefix("group_").removeprefix("reward: ")
        raise ConfigError(f"{key}: {problem}") from error
    except Exception as error:
        # Importing the user's own module may raise any exception.
        raise ConfigError(f"{key}: {name} cannot be imported: {describe(error)}") from error
    if missing := sorted(found.required & EXTRAS):
        raise ConfigError(
            f"{key}: {name} needs {', '.join(missing)}, which the journal does not hold; expected "
            "an answer and columns of the data; give the argument a default"
        )
    return found
