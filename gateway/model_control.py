"""What operators ask of models: what they have done, and whether this deployment takes requests for them.

Loading weights is the workers' business. To unload a model here is to refuse new requests for it, at every
gateway; what runs goes on, and pipelines keep standing. To load it is to take requests again.
"""

from dataclasses import dataclass
from typing import Protocol

from chassis.bus import Bus
from chassis.errors import BusError, Code, Status
from chassis.messages.gateway import ModelInfo
from chassis.messages.statistics import ModelStatistics, total
from chassis.statistics_view import look
from gateway.access.access import Access
from gateway.access.caller import Caller
from gateway.admission import not_served
from gateway.models import Models

TIMEOUT_S = 2.0
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Present:
    """A model that some pipeline serves."""

    info: ModelInfo
    loaded: bool


class Control(Protocol):
    def models(self, who: Caller) -> list[Present]:
        """Those that the caller may use, the unloaded ones too."""

    async def statistics(self, name: str) -> ModelStatistics:
        """Of a model's batchers together, since they started. Raises Status."""

    async def load(self, name: str, who: Caller) -> None:
        """Raises Status."""

    async def unload(self, name: str, who: Caller) -> None:
        """Raises Status."""


class ModelControl:
    """`operators`: ids of the keys that may load and unload; without keys everybody may."""

    def __init__(self, bus: Bus, models: Models, access: Access, operators: tuple[str, ...]) -> None:
        self._bus = bus
        self._models = models
        self._access = access
        self._operators = operators

    def models(self, who: Caller) -> list[Present]:
        return [
            Present(model.info, model.name not in self._models.unloaded)
            for model in self._models.present()
            if self._access.rights.may_use(who.key, model.name)
        ]

    async def statistics(self, name: str) -> ModelStatistics:
        try:
            shown = await look(self._bus, name, TIMEOUT_S)
        except BusError as error:
            raise Status(Code.UNAVAILABLE, f"statistics: {error}", RETRY_MS) from None
        if not shown.of_batchers:
            raise Status(Code.UNAVAILABLE, f"statistics: no batcher of {name[:200]} answers", RETRY_MS)
        return total(shown.of_batchers)[name]

    async def load(self, name: str, who: Caller) -> None:
        self._check(name, who)
        try:
            await self._models.unloaded.remove(name)
        except BusError as error:
            raise Status(Code.UNAVAILABLE, f"load: {error}", RETRY_MS) from None

    async def unload(self, name: str, who: Caller) -> None:
        self._check(name, who)
        try:
            await self._models.unloaded.add(name)
        except BusError as error:
            raise Status(Code.UNAVAILABLE, f"unload: {error}", RETRY_MS) from None

    def _check(self, name: str, who: Caller) -> None:
        if not self._access.open and who.key not in self._operators:
            raise Status(Code.PERMISSION_DENIED, "model_name: this key may not load or unload models")
        names = [found.info.name for found in self.models(who)]
        if name not in names:
            raise not_served("model_name", name, names)
