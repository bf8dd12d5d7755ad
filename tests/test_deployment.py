"""What a deployment that fails is said to have failed of."""

from __future__ import annotations

import pytest

from service.inference.deployment import last_failure

TRACEBACK = """The deployment failed to start 3 times in a row. See logs for details. Error:
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica:x:InferenceReplica.initialize()
  File "service/inference/engine.py", line 259, in _update
    raise PolicyUnavailable(f"inference: {self._broken}") from error
actors.policy.PolicyUnavailable: inference: a weight update failed: ValueError: 3 of 4 tensors

"""


@pytest.mark.parametrize(
    ("messages", "failure"),
    [
        (
            [TRACEBACK],
            "actors.policy.PolicyUnavailable: inference: a weight update failed: ValueError: 3 of "
            "4 tensors",
        ),
        (["", TRACEBACK.splitlines()[0]], TRACEBACK.splitlines()[0]),
        ([""], "nothing is known of its replicas"),
        ([], "nothing is known of its replicas"),
    ],
)
def test_the_last_line_of_a_traceback_is_told(messages: list[str], failure: str) -> None:
    assert last_failure(messages) == failure
