"""docs/coming-from.md: an environment of skyrl-gym, unchanged."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class NextNumber(BaseTextEnv):
    """Reward the number that comes next."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.ground_truth = extras["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        said = action.strip()
        reward = float(said == self.ground_truth) + 0.1 * said.isdigit()
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
