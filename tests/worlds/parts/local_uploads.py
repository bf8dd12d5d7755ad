"""The uploads that the routes call, in this process and without Ray."""

from __future__ import annotations

from collections.abc import Callable

from actors.environment.policy import PolicyClient
from service.gateway.sampling import GatewaySettings
from service.gateway.uploads import Uploads
from service.store.uploads import UploadStore
from worlds.builders.episode_builders import renderer
from worlds.parts.submission_service import Service


def local_uploads(
    service: Service,
    settings: GatewaySettings,
    *,
    make_policy: Callable[[], PolicyClient],
    count_turn: Callable[[str], None] = lambda key_name: None,
) -> Uploads:
    return Uploads(
        settings,
        renderer=renderer(),
        store=UploadStore(service.store),
        term=service.store.newest_term(),
        make_policy=make_policy,
        count_turn=count_turn,
    )
