"""The application that Ray Serve imports by name, as in the chart's serveConfigV2.

applications:
  - name: rayloom
    import_path: deploy.serve_app:build
    route_prefix: /
    args: {config: {model: ..., tasks: ...}, run_dir: /var/lib/rayloom/runs/demo}

RAYLOOM_DATABASE_URL on the head node (usually from a Secret) names the PostgreSQL database of a new
run. Without this variable, the database is stored in state_dir or, without a state_dir, in run_dir.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deploy.train_job import RunArguments
from service.api.settings import http_settings
from service.launch.run_dir import RunDir, run_id_of, session_secret
from service.serve.ingress import ingress_application
from service.serve.serve_host import run_host
from service.store.database import PATIENCE_S
from service.store.place import StoreOptions


def build(args: dict[str, Any]) -> Any:
    """Return the application of the API and the run. args: the fields of RunArguments.

    Raises: ValidationError, ConfigError if the run is refused.
    """
    arguments = RunArguments.model_validate(args)
    config = arguments.read_config()
    # PostgreSQL may still be starting.
    run_dir = RunDir(path=arguments.run_dir, patience_s=PATIENCE_S)
    host = run_host(config, run_dir, StoreOptions(state_dir=arguments.state_dir))
    api = http_settings(config)
    if api.key_digest is None:
        api = replace(api, session_secret=session_secret(run_dir))
    return ingress_application(run_id_of(config, run_dir), api, host=host)
