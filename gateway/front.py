"""What a front door needs of the gateway; every protocol stands on these."""

from collections.abc import AsyncGenerator
from typing import Protocol

from chassis.messages.gateway import GenerateCall, GenerateEvent, ModelInfo
from chassis.trace import TraceContext
from gateway.access.caller import Caller


class Front(Protocol):
    """A door asks who calls and says so in all else: `replace(call, tenant=who.tenant, key=who.key)`."""

    @property
    def ready(self) -> bool: ...

    def authenticate(self, token: str | None) -> Caller:
        """Raises Status (UNAUTHENTICATED)."""

    def generate(
        self, call: GenerateCall, caller: TraceContext | None = None
    ) -> AsyncGenerator[GenerateEvent, None]: ...

    def resume(
        self,
        request_id: str,
        output_ids: tuple[int, ...],
        tenant: str = "",
        caller: TraceContext | None = None,
        key: str = "",
    ) -> AsyncGenerator[GenerateEvent, None]: ...

    async def cancel(self, request_id: str, tenant: str = "") -> None: ...

    async def tokenize(self, call: GenerateCall) -> tuple[int, ...]: ...

    async def detokenize(self, call: GenerateCall) -> tuple[bytes, ...]:
        """The bytes of each of its token ids. Raises Status."""

    def list_models(self, who: Caller | None = None) -> list[ModelInfo]:
        """Those that `who` may use; None is one of ours."""

    def may_use(self, who: Caller, model: str) -> bool:
        """By its key, whether the model is served now or not."""
