"""What lies where in a run's directory, and whether a new run may use it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from service.config.file import ConfigError, dump_config, parse_config
from service.config.tree import Config

# What must not change between a run and its resumption, because the checkpoint depends on it.
FIXED_SECTIONS = ("model", "tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths only; nothing is created by naming them."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.path / 'rayloom.db'}"

    @property
    def database_file(self) -> Path:
        return self.path / "rayloom.db"

    @property
    def tiny_model(self) -> Path:
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log_file(self) -> Path:
        return self.path / "run.log"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"


def default_run_dir(config: Config) -> RunDir:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return RunDir(path=Path("runs") / f"{config.run.name}-{stamp}")


def create(run_dir: RunDir) -> None:
    """Make the directory of a new run. Raises: ConfigError where another run lies there."""
    if run_dir.path.exists() and (not run_dir.path.is_dir() or any(run_dir.path.iterdir())):
        raise ConfigError(
            f"run directory {run_dir.path} is not empty; expected a new one: choose another "
            f"--run-dir, or go on with that run by --resume {run_dir.path}"
        )
    run_dir.path.mkdir(parents=True, exist_ok=True)


def write_config(run_dir: RunDir, config: Config) -> None:
    run_dir.config_file.write_text(dump_config(config))


def check_resumable(run_dir: RunDir, config: Config) -> None:
    """A run can go on with this configuration. Raises: ConfigError."""
    if not run_dir.database_file.is_file() or not run_dir.config_file.is_file():
        raise ConfigError(
            f"--resume {run_dir.path}: no run lies there; expected a directory with rayloom.db "
            "and config.yaml, as `rayloom train` makes it"
        )
    before = parse_config(
        yaml.safe_load(run_dir.config_file.read_text()), source=str(run_dir.config_file)
    )
    for section in FIXED_SECTIONS:
        if getattr(before, section) != getattr(config, section):
            raise ConfigError(
                f"--resume {run_dir.path}: section {section} differs from the run's own "
                f"({run_dir.config_file}); expected the same, because the checkpoint and the task "
                "order depend on it; use the run's configuration, or start a new run"
            )
    if before.run.seed != config.run.seed:
        raise ConfigError(
            f"--resume {run_dir.path}: run.seed is {config.run.seed}, the run began with "
            f"{before.run.seed}; expected the same, because the tasks derive from it"
        )
