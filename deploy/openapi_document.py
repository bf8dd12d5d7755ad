"""Write the OpenAPI document of the API with all its routes: `python -m deploy.openapi_document`.

The document is stored in `docs/openapi.json`; a test compares this file with the application.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from actors.algorithm import AlgorithmSettings
from actors.environment.settings import RolloutSettings
from service.api.app import create_app
from service.api.control_routes import add_control
from service.api.ports import RunPort
from service.api.run_page import add_page
from service.api.settings import HttpSettings
from service.config.sections import ServiceSettings
from service.gateway.routes import add_sessions
from service.gateway.upload_routes import add_uploads

DOCUMENT = Path(__file__).parents[1] / "docs" / "openapi.json"


def whole_document() -> dict[str, Any]:
    """Return the OpenAPI document of the API with all its routes."""
    settings = HttpSettings(
        rollouts=RolloutSettings(),
        service=ServiceSettings(),
        algorithm=AlgorithmSettings(),
        environments=(),
    )
    # No request is made, so none of these is called.
    run, gateway = cast(RunPort, None), cast(Any, None)
    app = create_app(run, settings)
    add_control(app, run)
    add_sessions(app, run, gateway, settings)
    add_uploads(app, run, gateway, settings)
    add_page(app, run)
    return app.openapi()


def document_text() -> str:
    """Return the document as the text of the checked-in file."""
    return json.dumps(whole_document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document_text(), encoding="utf-8")
