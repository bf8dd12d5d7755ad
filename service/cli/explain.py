"""`rayloom explain`: show which trajectories and groups caused a step's update."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from service.cli.outlet import say
from service.explain.order import Order
from service.explain.recompute import explain_step
from service.explain.show import describe, document
from service.explain.source import find_source

DEFAULT_TOP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """Arguments of `rayloom explain`."""

    run: Path
    step: int
    top: int | None = None
    """Number of trajectories to show; None if the option was not given."""
    by: Order = Order.OWN
    replays: bool = False
    """First train again on the steps between the checkpoint and the step."""
    is_json: bool = False


def run_explain(request: ExplainRequest) -> int:
    """Recompute the gradients, print them and return the exit code.

    Raises: ConfigError if the request is refused.
    """
    source = find_source(request.run, request.step)
    # torch warns that a single process reads the checkpoint, which is intended here.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    found = explain_step(source, replays=request.replays)
    if request.is_json:
        say(json.dumps(document(found, by=request.by, top=request.top), allow_nan=False))
    else:
        say(describe(found, by=request.by, top=request.top or DEFAULT_TOP))
    return 0
