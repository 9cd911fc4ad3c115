"""kvstore's link to one stage of a pipeline: calls that save and load blocks, each with its deadline.

It is dialled again whenever it is lost, as long as the pipeline may stand. A call that the link did not
outlive has failed; whether the worker still writes what it was told, nobody knows then (`Doubt`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from chassis import log
from chassis.errors import LinkClosed
from chassis.ids import BlockHash, BootId, Epoch
from chassis.messages import BadMessage, check
from chassis.messages.kvstore import StageAddress
from chassis.messages.pipeline import BATCHER_STAGE, Hello, LinkKind, build_hello
from chassis.messages.tier import (
    LoadBlocks,
    SaveBlocks,
    TierContent,
    TierDone,
    TierMessage,
    TierStage,
    build_tier,
    parse_tier,
    seed_of,
)
from chassis.transport.interface import Frame, Link, LinkOptions, Transport
from kvstore.content import Pages
from kvstore.moves import Move

SLOTS = 4
SLOT_BYTES = 64 << 20
REDIAL_S = 0.5


class CallFailed(Exception):
    """It did not happen, and does not happen any more."""


class Doubt(CallFailed):
    """It may still happen."""


@dataclass(slots=True)
class _Call:
    contents: tuple[BlockHash, ...]
    done: "asyncio.Future[TierDone]"
    saves: bool
    got: dict[int, list[Pages]] = field(default_factory=dict)


class StageLink:
    def __init__(
        self, transport: Transport, boot: BootId, epoch: Epoch, stage: StageAddress, timeout_s: float
    ) -> None:
        self.kept: TierStage | None = None  # what the worker says it holds; None: no link
        self.space = 0
        self.wrong = 0  # pages that came and did not prove what they are
        self._transport = transport
        self._boot = boot
        self._epoch = epoch
        self._stage = stage
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._calls: dict[int, _Call] = {}
        self._last_call = 0
        self.changed = asyncio.Event()  # the link came or went
        self.tried = asyncio.Event()  # the first dial has brought a link, or none

    @property
    def layers(self) -> range:
        return self._stage.layers

    async def run(self) -> None:
        """Until cancelled."""
        hello = build_hello(Hello(self._epoch, BATCHER_STAGE, self._boot, LinkKind.TIER))
        options = LinkOptions(SLOTS, SLOT_BYTES, self._timeout_s)
        while True:
            try:
                link = await self._transport.dial(self._stage.transport_address, hello, options)
            except (LinkClosed, ValueError) as error:
                log.debug("stage not reached", address=self._stage.transport_address, error=str(error))
                self.tried.set()
            else:
                await self._serve(link)
            await asyncio.sleep(REDIAL_S)

    async def _serve(self, link: Link) -> None:
        try:
            while True:
                frame = await link.receive()
                try:
                    self._take(link, frame)
                finally:
                    frame.release()
        except BadMessage as error:
            log.warning("a stage sent garbage", address=self._stage.transport_address, error=str(error))
        except LinkClosed:
            pass
        finally:
            link.close()
            self._lost()

    def _lost(self) -> None:
        self.kept = self._link = None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done.done():
                call.done.set_exception(Doubt("link lost"))
        self.changed.set()
        self.tried.set()

    def _take(self, link: Link, frame: Frame) -> None:
        message = parse_tier(frame.header)
        if self.kept is None:
            check(isinstance(message, TierStage), "the stage does not say what it holds")
            assert isinstance(message, TierStage)
            check(message.epoch == self._epoch, f"epoch {message.epoch}, not {self._epoch}")
            check(message.layers == self.layers, f"layers {message.layers}, not {self.layers}")
            self.kept, self._link, self.space = message, link, seed_of(message.layout)
            self.changed.set()
            self.tried.set()
            return
        self._answer(message, frame)

    def _answer(self, message: TierMessage, frame: Frame) -> None:
        match message:
            case TierContent():
                call = self._calls.get(message.call)
                if call is None or not call.saves:
                    return  # given up
                check(message.index < len(call.contents), "a content that was not asked for")
                data = bytes(frame.payload)
                pages = Pages(self.space, message.layers, message.checksums, message.stamp, data)
                inside = self.layers.start <= pages.layers.start and pages.layers.stop <= self.layers.stop
                if inside and pages.proves(call.contents[message.index]):
                    call.got.setdefault(message.index, []).append(pages)
                else:
                    self.wrong += 1
            case TierDone():
                call = self._calls.get(message.call)
                if call is not None and not call.done.done():
                    call.done.set_result(message)
            case _:
                raise BadMessage("no answer of a stage")

    async def save(self, attachment: int, move: Move) -> dict[int, list[Pages]]:
        """The pages of each block, but for those that the worker refused. Raises CallFailed."""
        call = self._new_call(move.contents, saves=True)
        message = SaveBlocks(self._epoch, attachment, self._last_call, move.blocks, move.contents)
        done, got = await self._perform(self._last_call, call, message, ())
        for index in done.refused:
            got.pop(index, None)
        return got

    async def load(self, attachment: int, move: Move, pages: Sequence[Pages]) -> frozenset[int]:
        """Which blocks the worker refused. Raises CallFailed; Doubt, if they may be written later."""
        call = self._new_call(move.contents, saves=False)
        message = LoadBlocks(self._epoch, attachment, self._last_call, move.blocks, move.contents)
        done, _ = await self._perform(self._last_call, call, message, pages)
        return frozenset(done.refused)

    def _new_call(self, contents: tuple[BlockHash, ...], saves: bool) -> _Call:
        if self._link is None:
            raise CallFailed("no link")
        self._last_call += 1
        call = _Call(contents, asyncio.get_running_loop().create_future(), saves)
        self._calls[self._last_call] = call
        return call

    async def _perform(
        self, number: int, call: _Call, message: TierMessage, pages: Sequence[Pages]
    ) -> tuple[TierDone, dict[int, list[Pages]]]:
        link = self._link
        assert link is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.send(build_tier(message))
                for index, content in enumerate(pages):
                    if call.done.done():
                        break  # refused
                    header = TierContent(number, index, content.layers.start, content.sums, content.stamp)
                    await link.send(build_tier(header), content.data)
                done = await call.done
        except (LinkClosed, TimeoutError, ValueError) as error:
            link.close()
            raise Doubt(str(error) or type(error).__name__) from None
        finally:
            self._calls.pop(number, None)
            if call.done.done() and not call.done.cancelled():
                call.done.exception()  # looked at
        if done.error:
            raise CallFailed(done.error)
        return done, call.got
