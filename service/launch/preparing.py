"""What comes before a run's supervisor, whoever starts it: the checks, the model, the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from service.config.preflight import check_with_model, check_without_model
from service.config.tree import Config
from service.launch.run_dir import RunDir, prepared, write_config


@contextmanager
def prepared_run(
    config: Config, run_dir: RunDir, *, is_local: bool, between: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Check all that can be checked, build what is missing; yields the model's path or name.

    is_local: the run will play on this machine. between: called after each part that takes
    seconds; what it raises gives the start up. A directory of which no run comes is taken away.
    Raises: ConfigError.
    """
    observation = check_without_model(config, is_local=is_local)
    with prepared(run_dir):
        model = _model_path(config, run_dir)
        between()
        check_with_model(config, observation, model_path=model)
        write_config(run_dir, config)
        yield model


def run_id_of(config: Config, run_dir: RunDir) -> str:
    """One name for a run, whoever runs it, so that what a dead run left can be found and ended."""
    digest = blake2b(str(run_dir.path).encode(), digest_size=4).hexdigest()
    return f"rayloom-{config.run.name}-{digest}"


def _model_path(config: Config, run_dir: RunDir) -> str:
    if config.model.tiny is not None:
        # Two seconds of imports that a model of the user's own does without.
        from service.cli.artifacts import build_tiny_for

        return build_tiny_for(config.model.tiny, run_dir.tiny_model)
    assert config.model.path is not None
    path = Path(config.model.path).expanduser()
    return str(path.absolute()) if path.is_dir() else config.model.path
