"""The application that Ray Serve imports by name, as the chart's serveConfigV2 has it.

applications:
  - name: rayloom
    import_path: deploy.serve_app:build
    route_prefix: /
    args: {config: /etc/rayloom/config.yaml, run_dir: /var/lib/rayloom/runs/demo}

The database of a new run lies in the PostgreSQL that RAYLOOM_DATABASE_URL names on the head node,
as a Secret gives it; else in state_dir; else in run_dir.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.api.ingress import ingress_application
from service.api.settings import http_settings
from service.config.file import load_config
from service.launch.run_dir import RunDir, run_id_of
from service.launch.serve_host import run_host
from service.store.database import PATIENCE_S
from service.store.place import StoreOptions


class ServeArguments(BaseModel):
    """`args` of the application."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path = Field(description="a YAML file, on every node that may import this")
    run_dir: Path = Field(description="on storage that every node sees; a run in it is resumed")
    state_dir: Path | None = Field(
        None, description="where rayloom.db is to lie, on a local disk of the head node"
    )
    overrides: tuple[str, ...] = Field((), description="such as run.steps=1000")


def build(args: dict[str, Any]) -> Any:
    """The API and the run behind it. args: of ServeArguments.

    Raises: ValidationError, ConfigError for what cannot run.
    """
    arguments = ServeArguments.model_validate(args)
    config = load_config(arguments.config, arguments.overrides)
    # Serve gives a replica three attempts, which a restart of PostgreSQL outlasts.
    run_dir = RunDir(path=arguments.run_dir, patience_s=PATIENCE_S)
    host = run_host(config, run_dir, StoreOptions(state_dir=arguments.state_dir))
    return ingress_application(run_id_of(config, run_dir), http_settings(config), host=host)
