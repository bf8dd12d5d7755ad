"""The command of the chart's RayJob: `python -m deploy.train_job ARGUMENTS`.

ARGUMENTS is a `RunArguments` as JSON. The process becomes `rayloom train` on the cluster on which
it is started. It begins a new run, or continues the existing one if the job is retried or resumed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.config.file import ConfigError, dump_config, load_config, parse_config
from service.config.tree import Config
from service.launch.run_dir import RunDir, check_new, place_store, prepared_directory, run_id_of
from service.store.database import PATIENCE_S
from service.store.errors import StoreError
from service.store.place import StoreOptions

EXIT_REFUSED = 2
# The default of metrics.stays_s, in which a Prometheus that scrapes once a minute reads the end.
LAST_SCRAPES_S = 120.0


class RunArguments(BaseModel):
    """The configuration and the directories of a run.

    The Helm chart passes them to this module as JSON (RayJob), or to `serve_app` as the arguments
    of the Serve application.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] | Path = Field(
        description="the configuration, or a YAML file on each node that imports the application"
    )
    run_dir: Path = Field(description="on storage that every node sees; a run in it is resumed")
    state_dir: Path | None = Field(
        None, description="directory for rayloom.db, on a local disk of the head node"
    )
    overrides: tuple[str, ...] = Field((), description="such as run.steps=1000")

    def read_config(self) -> Config:
        """Return the configuration. Raises: ConfigError."""
        if isinstance(self.config, Path):
            return load_config(self.config, self.overrides)
        return parse_config(self.config, source="of the arguments", overrides=self.overrides)


def train_command(text: str, *, directory: Path) -> list[str]:
    """Wait until the database answers, and return the command line of `rayloom train`.

    text: `RunArguments` as JSON. directory: receives the file of the configuration.
    Raises: ValidationError, ConfigError, StoreError if the run is refused.
    """
    arguments = RunArguments.model_validate_json(text)
    file = directory / "config.yaml"
    config = arguments.read_config()
    metrics = replace(config.metrics, stays_s=config.metrics.stays_s or LAST_SCRAPES_S)
    file.write_text(dump_config(replace(config, metrics=metrics)), encoding="utf-8")
    # PostgreSQL may still be starting.
    run_dir = RunDir(path=arguments.run_dir, patience_s=PATIENCE_S)
    command = [sys.executable, "-m", "service.cli.main", "train", str(file), "--address", "auto"]
    if run_dir.has_run():
        return [*command, "--resume", str(run_dir.path)]
    state_dir = arguments.state_dir
    check_new(run_dir)
    with prepared_directory(run_dir):
        # The command itself does not wait for a database. No file is left in the directory.
        place_store(run_dir, run_id_of(config, run_dir), StoreOptions(state_dir=state_dir))
    place = [] if state_dir is None else ["--state-dir", str(state_dir)]
    return [*command, "--run-dir", str(run_dir.path), *place]


def main() -> None:
    """Replace this process by `rayloom train`, so that the job's signals reach the training.

    The function does not return. It exits with an error if the arguments are refused.
    """
    if len(sys.argv) != 2:
        sys.exit("usage: python -m deploy.train_job ARGUMENTS")
    try:
        command = train_command(sys.argv[1], directory=Path(tempfile.mkdtemp()))
    except (ConfigError, StoreError, ValidationError) as error:
        print(f"rayloom: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
