"""What a deployment that fails is said to have failed of."""

from __future__ import annotations

import pytest

from service.inference.deployment import MAX_FAILURE_CHARACTERS, last_failure

OPENING = "The deployment failed to start 3 times in a row. See logs for details. Error:"
TRACEBACK = f"""{OPENING}
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica:x:InferenceReplica.initialize()
  File "service/inference/engine.py", line 259, in _update
    raise PolicyUnavailable(f"inference: {{self._broken}}") from error
actors.policy.PolicyUnavailable: inference: a weight update failed: ValueError: 3 of 4 tensors

"""
VALIDATION = f"""{OPENING}
  File "vllm/config/model.py", line 1, in __init__
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len (4096) is greater than 512
    For further information visit https://errors.pydantic.dev
"""


@pytest.mark.parametrize(
    ("messages", "failure"),
    [
        (
            ["Failed to update the deployments.", TRACEBACK],
            "actors.policy.PolicyUnavailable: inference: a weight update failed: ValueError: 3 of "
            "4 tensors",
        ),
        (
            [VALIDATION],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, max_model_len (4096) is greater than 512 For further information visit "
            "https://errors.pydantic.dev",
        ),
        (["Deploying app failed.", ""], "Deploying app failed."),
        (["", ""], "nothing is known of its replicas"),
        ([], "nothing is known of its replicas"),
    ],
)
def test_the_last_exception_is_told_in_one_line(messages: list[str], failure: str) -> None:
    assert last_failure(messages) == failure


def test_a_long_exception_is_told_in_part() -> None:
    assert last_failure(["ValueError: " + "x" * 9999]) == (
        "ValueError: " + "x" * (MAX_FAILURE_CHARACTERS - len("ValueError: "))
    )
