"""`rayloom explain`: show which trajectories and groups caused a step's update."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from transformers.utils import logging as transformers_logging

from service.cli.outlet import say
from service.explain.order import Order
from service.explain.recompute import explain_step
from service.explain.show import describe, document
from service.explain.source import find_source

DEFAULT_TOP = 10


def run_explain(
    run: Path,
    step: int,
    *,
    by: Order = Order.OWN,
    top: int | None = None,
    replays: bool = False,
    is_json: bool = False,
) -> None:
    """Recompute the gradients of a step and print them. Raises: ConfigError.

    Args: top: number of trajectories to show; None: 10, or all in a document. replays: first train
    again on the steps between the checkpoint and the step.
    """
    source = find_source(run, step)
    # torch warns that a single process reads the checkpoint, which is intended here.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    found = explain_step(source, replays=replays)
    if is_json:
        say(json.dumps(document(found, by=by, top=top), allow_nan=False))
    else:
        say(describe(found, by=by, top=top or DEFAULT_TOP))
