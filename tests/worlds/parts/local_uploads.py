"""What the routes of uploads ask of the gateway, in this process: its own uploads and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.environment.policy import GenerateReply, GenerateRequest, PolicyClient
from service.gateway.generation import Generation
from service.gateway.sessions import GatewaySettings
from service.gateway.uploads import Uploads, policy_facts
from service.intake.uploads import (
    GroupPolicy,
    PolicyFacts,
    Upload,
    UploadGroup,
    UploadReply,
    UploadView,
)
from service.store.uploads import UploadStore
from worlds.builders.episode_builders import renderer
from worlds.parts.submission_service import Service


class LocalUploads:
    """`service.gateway.upload_routes.UploadPort`."""

    def __init__(
        self,
        service: Service,
        settings: GatewaySettings,
        *,
        make_policy: Callable[[], PolicyClient],
        take_turn: Callable[[str], None] = lambda key_name: None,
    ) -> None:
        self.facts = policy_facts(settings, renderer())
        store = service.store
        self.uploads = Uploads(settings, store=UploadStore(store), term=store.newest_term())
        self.generation = Generation(make_policy, take_turn=take_turn)

    async def policy_facts(self) -> PolicyFacts:
        return self.facts

    async def upload(
        self, uploads: Sequence[Upload], policies: Sequence[GroupPolicy], **limits: int
    ) -> UploadReply:
        return await self.uploads.add(uploads, policies, **limits)

    async def uploaded(self, name: str) -> UploadView | None:
        return await self.uploads.view(name)

    async def drop_group(self, group: str) -> UploadGroup | None:
        return await self.uploads.drop(group)

    async def generate(self, request: GenerateRequest, key_name: str) -> GenerateReply:
        return await self.generation.generate(request, key_name)
