"""The models that are served now, as the registry tells, and what a gateway needs of each.

A card is fetched once by its digest and kept; its tokenizer and template are built then, so that no request
waits for them. A model that left the registry is not admitted, but what it was stays known for streams.
A card that is missing or bad is fetched again ever later; another digest starts anew.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from chassis import log, subjects
from chassis.bus import Bus, Entry, Subscription
from chassis.errors import BusError, Code, Status
from chassis.messages import BadMessage
from chassis.messages.card import ModelCard, card_digest, parse_card
from chassis.messages.gateway import ModelInfo
from chassis.messages.registry import ModelEntry, parse_model
from gateway.admission import SERVED_TOLD_LEN_MAX, ModelFacts, invalid, not_served
from gateway.chat import ChatTemplate
from gateway.tokenizer import Encoder, TextTokenizer
from gateway.tool_calls.forms import ToolForm
from gateway.unloaded import Unloaded

REFRESH_S = 10.0
RETRY_S = 0.5
RETRY_MAX_S = 30.0
CARDS_LEN_MAX = 16
INLINE_TOKENIZER_BYTES_MAX = 256 * 1024  # built in some milliseconds


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded card under the name it is served as. Without a tokenizer it takes token ids only."""

    name: str
    card_digest: str
    card: ModelCard
    tokenizer: TextTokenizer | None
    template: ChatTemplate | None

    @property
    def info(self) -> ModelInfo:
        """What clients are told."""
        card = self.card
        sizes = card.context_len_max, card.vocab_size
        form = ToolForm.HERMES if self.template is None else self.template.tool_form
        return ModelInfo(self.name, card.model_digest, *sizes, self.template is not None, form.value)

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(self.name, self.card.context_len_max, self.card.vocab_size)


@dataclass(frozen=True, slots=True)
class Retry:
    """Of a card that could not be loaded."""

    card_digest: str
    delay_s: float
    due: float  # on the loop's clock


class Models:
    def __init__(self, bus: Bus, encoder: Encoder, models_len_max: int, fetch_timeout_s: float) -> None:
        self.unloaded = Unloaded(bus)
        self._bus = bus
        self._encoder = encoder
        self._models_len_max = models_len_max
        self._fetch_timeout_s = fetch_timeout_s
        self._served: dict[str, ModelEntry] = {}
        self._loaded: dict[str, Model] = {}  # by name, the newest last
        self._retries: dict[str, Retry] = {}  # by name, of models served
        self._work = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Some model can be asked for."""
        return any(name in self._loaded and name not in self.unloaded for name in self._served)

    @property
    def context_len_max(self) -> int:
        """Of all whose cards are here."""
        return max((model.card.context_len_max for model in self._loaded.values()), default=0)

    def known(self, name: str) -> Model | None:
        """A model whose card is here, served or not; the empty name is the only one."""
        if not name and len(self._loaded) == 1:
            return next(iter(self._loaded.values()))
        return self._loaded.get(name)

    def served(self) -> list[Model]:
        """Those that may be asked."""
        return [model for model in self.present() if model.name not in self.unloaded]

    def present(self) -> list[Model]:
        """The unloaded ones too."""
        found = [self._loaded[name] for name in self._served if name in self._loaded]
        return sorted(found, key=lambda model: model.name)

    async def find(self, name: str, may_use: Callable[[str], bool] = lambda name: True) -> Model:
        """Waits a little for a card under way. A refusal names what the caller may use. Raises Status."""
        try:
            async with asyncio.timeout(self._fetch_timeout_s):
                while True:
                    entry = self._entry(name, may_use)
                    if entry.name in self.unloaded:
                        raise Status(
                            Code.UNAVAILABLE, f"model: {entry.name[:200]} was unloaded; load it first"
                        )
                    model = self._loaded.get(entry.name)
                    if model is not None:
                        return model
                    self._changed.clear()
                    self._work.set()
                    await self._changed.wait()
        except TimeoutError:
            raise Status(Code.UNAVAILABLE, f"model {name}: its card is not here yet", 1000) from None

    def _entry(self, name: str, may_use: Callable[[str], bool]) -> ModelEntry:
        if name:
            entry = self._served.get(name)
            if entry is None:
                raise not_served("model", name, filter(may_use, self._served))
            return entry
        if not self._served:
            raise Status(Code.UNAVAILABLE, "model: none is served yet", 1000)
        usable = sorted(filter(may_use, self._served))
        if not usable:
            raise Status(Code.PERMISSION_DENIED, "model: this key may use none of those that are served")
        if len(usable) > 1:
            names = ", ".join(usable)[:SERVED_TOLD_LEN_MAX]
            raise invalid(f"model: several are served; name one of {names}")
        return self._served[usable[0]]

    async def run(self) -> None:
        """Until cancelled: watches, loads, forgets."""
        subscription: Subscription | None = None
        unloads: Subscription | None = None
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + REFRESH_S
        try:
            while True:
                try:
                    if subscription is None:
                        subscription = await self._bus.watch(subjects.MODELS, self._on_entry)
                    if unloads is None:
                        unloads = await self.unloaded.watch()
                    if loop.time() >= refresh_at:
                        self._replace(await self._bus.entries(subjects.MODELS))
                        await self.unloaded.refresh()
                        refresh_at = loop.time() + REFRESH_S
                    until = min(refresh_at, await self._load_all())
                except BusError as error:
                    log.debug("models not refreshed", error=str(error))
                    until = min(refresh_at, loop.time() + RETRY_S)
                try:
                    async with asyncio.timeout_at(max(until, loop.time() + RETRY_S / 10)):
                        await self._work.wait()
                    self._work.clear()
                except TimeoutError:
                    pass
        finally:
            for opened in (subscription, unloads):
                if opened is not None:
                    await opened.close()

    def _on_entry(self, entry: Entry) -> None:
        self._take(entry)
        self._work.set()
        self._changed.set()

    def _replace(self, entries: Sequence[Entry]) -> None:
        present = [e for e in entries if e.value is not None]
        names = {model.name for e in present if (model := _parse(e)) is not None}
        for name in [n for n in self._served if n not in names]:
            del self._served[name]
        for entry in present:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        if entry.value is None:
            for name in [n for n in self._served if subjects.model_key(n) == entry.key]:
                del self._served[name]
            return
        model = _parse(entry)
        if model is None:
            return
        if model.name not in self._served and len(self._served) >= self._models_len_max:
            log.warning("too many models", model=model.name, models_len_max=self._models_len_max)
            return
        self._served[model.name] = model

    async def _load_all(self) -> float:
        """Loads what may be tried now. When the next card may be, on the loop's clock."""
        loop = asyncio.get_running_loop()
        for name in [n for n in self._retries if n not in self._served]:
            del self._retries[name]
        for entry in list(self._served.values()):
            loaded, last = self._loaded.get(entry.name), self._retries.get(entry.name)
            if last is not None and last.card_digest != entry.card_digest:
                last = None
            if loaded is not None and loaded.card_digest == entry.card_digest:
                self._retries.pop(entry.name, None)  # a bad one was taken back
                continue
            if last is not None and loop.time() < last.due:
                continue
            if await self._load(entry):
                self._retries.pop(entry.name, None)
            else:
                delay_s = RETRY_S if last is None else min(2 * last.delay_s, RETRY_MAX_S)
                self._retries[entry.name] = Retry(entry.card_digest, delay_s, loop.time() + delay_s)
        return min((retry.due for retry in self._retries.values()), default=math.inf)

    async def _load(self, entry: ModelEntry) -> bool:
        try:
            data = await self._bus.object(subjects.card_object(entry.card_digest))
            if data is None or card_digest(data) != entry.card_digest:
                return False
            card = parse_card(data)
            tokenizer = await self._tokenizer(card)
            template = _template(card)
        except (BadMessage, ValueError, TemplateError) as error:
            log.error("model card not usable", model=entry.name, card=entry.card_digest, error=str(error))
            return False
        self._loaded.pop(entry.name, None)
        self._loaded[entry.name] = Model(entry.name, entry.card_digest, card, tokenizer, template)
        self._forget_some()
        self._changed.set()
        log.info("model known", model=entry.name, card=entry.card_digest, vocab_size=card.vocab_size)
        return True

    async def _tokenizer(self, card: ModelCard) -> TextTokenizer | None:
        size = len(card.tokenizer_json)
        if size <= INLINE_TOKENIZER_BYTES_MAX:
            return TextTokenizer(card) if size else None
        return await self._encoder.run(size, lambda: TextTokenizer(card))

    def _forget_some(self) -> None:
        idle = [name for name in self._loaded if name not in self._served]
        for name in idle[: max(0, len(self._loaded) - CARDS_LEN_MAX)]:
            del self._loaded[name]


def _template(card: ModelCard) -> ChatTemplate | None:
    return ChatTemplate(card.chat_template, card.bos_token, card.eos_token) if card.chat_template else None


def _parse(entry: Entry) -> ModelEntry | None:
    try:
        assert entry.value is not None
        model = parse_model(entry.value)
        if subjects.model_key(model.name) == entry.key and model.card_digest.isalnum():
            return model
    except (BadMessage, ValueError) as error:
        log.warning("bad registry entry dropped", key=entry.key, error=str(error))
    return None
