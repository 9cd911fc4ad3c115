"""A rank that is not the leader: it joins, does what it is told in order, and goes when the leader goes.

One thread does steps and loads, one pages, one says each second that the process lives and looks whether the
leader does: who waits in a sum reads nothing. Whoever is refused, or finds nobody within the limit, ends with
the reason; so does one whose step fails: all are out of step.
"""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chassis import log
from shard_worker.executor import LoadFailed
from shard_worker.ranks.collective import Collective, GroupCollective, meeting_point
from shard_worker.ranks.executor import RankExecutor
from shard_worker.ranks.frames import Frames, Kind, PeerLost
from shard_worker.ranks.leader import COLLECTIVE_S, PING_S, RankLost
from shard_worker.ranks.shared_memory import SharedCollective, place
from shard_worker.ranks.words import (
    Answer,
    Hello,
    Load,
    Welcome,
    pack,
    parse,
    parse_copy,
    parse_pages,
    parse_places,
    parse_step,
)

RETRY_S = 0.1
WORDS_MAX = 1 << 16


class Follower:
    def __init__(self, executor: RankExecutor, leader: str, silence_s: float, join_s: float) -> None:
        """`leader`: host:port."""
        host, _, port = leader.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._executor = executor
        self._silence_s, self._join_s = silence_s, join_s
        self._steps: Frames | None = None
        self._pages: Frames | None = None
        self._collective: Collective | None = None
        self._agreed = True
        self._over = threading.Event()
        self._when_lost: Callable[[], object] = lambda: None
        self.joined = False
        self.num_steps = 0

    def follow(self) -> None:
        """Until the leader goes, or `stop`. Raises RankLost, LoadFailed, and what steps raise."""
        try:
            self._steps = steps = self._join(pages=False)
            self._pages = self._join(pages=True)
            welcome = self._welcomed(steps)
            self._welcomed(self._pages)
            steps.allow(self._silence_s)
            self._pages.allow(None)
            threading.Thread(target=self._ping, args=(steps,), name="pings", daemon=True).start()
            self._collective = self._met(steps, welcome)
            self._executor.meet(self._collective, self._agree)
            threading.Thread(target=self._serve_pages, args=(self._pages,), name="pages", daemon=True).start()
            self.joined = True
            log.info("joined", rank=self._executor.rank, leader=steps.peer)
            self._obey(steps)
        finally:
            self.stop()

    def when_lost(self, do: Callable[[], object]) -> None:
        """The leader is gone: `do` is called by the thread that notices."""
        self._when_lost = do

    def stop(self) -> None:
        """From any thread."""
        self._over.set()
        if self._collective is not None:
            self._collective.abort()
        for frames in (self._steps, self._pages):
            if frames is not None:
                frames.close()

    # ---- joining

    def _join(self, pages: bool) -> Frames:
        """Raises RankLost."""
        executor = self._executor
        hello = Hello(
            executor.rank,
            executor.ranks,
            pages,
            os.getpid(),
            executor.facts.digest,
            executor.settings,
            place(),
            executor.facts.layers_max,
        )
        error = "stopped"
        for _ in range(max(1, round(self._join_s / RETRY_S))):
            if self._over.is_set():
                break
            try:
                sock = socket.create_connection((self._host, self._port), timeout=self._join_s)
                frames = Frames(sock, self._join_s)
                frames.send(Kind.HELLO, pack(hello))
                return frames
            except (OSError, PeerLost) as failed:
                error = str(failed)
            self._over.wait(RETRY_S)
        raise RankLost(f"no leader at {self._host}:{self._port}: {error}")

    def _met(self, steps: Frames, welcome: Welcome) -> Collective:
        """Raises RuntimeError, OSError, PeerLost."""
        rank, ranks = self._executor.rank, self._executor.ranks
        if not welcome.file:
            store = meeting_point(self._host, welcome.store_port, ranks, COLLECTIVE_S)
            return GroupCollective(store, rank, ranks, steps.local_host, COLLECTIVE_S, self._executor.device)
        shared = SharedCollective(Path(welcome.file), rank, ranks, COLLECTIVE_S)
        steps.send(Kind.DONE, pack(Answer()))
        return shared

    def _welcomed(self, frames: Frames) -> Welcome:
        """Where ranks meet. Raises RankLost."""
        try:
            kind, data = frames.receive(WORDS_MAX)
        except PeerLost as error:
            raise RankLost(f"the leader {error}") from None
        if kind is Kind.REFUSED:
            raise RankLost(f"the leader refuses: {parse(Answer, data).error}")
        if kind is not Kind.WELCOME:
            raise RankLost(f"the leader says {kind.name}")
        return parse(Welcome, data)

    def _ping(self, steps: Frames) -> None:
        num_come, silent_s = 0, 0.0
        try:
            while not self._over.wait(PING_S):
                steps.send(Kind.PING)
                if steps.gone:
                    raise PeerLost("closed its connection")
                before, num_come = num_come, steps.num_come
                silent_s = silent_s + PING_S if num_come == before else 0.0
                if silent_s >= self._silence_s:
                    raise PeerLost(f"silent for {self._silence_s:g} s")
        except PeerLost as lost:
            if not self._over.is_set():
                log.warning("the leader is lost", cause=str(lost))
                self._when_lost()
                self.stop()

    # ---- commands

    def _obey(self, steps: Frames) -> None:
        while True:
            try:
                kind, data = steps.receive()
            except PeerLost as lost:
                log.info("the leader is gone", cause=str(lost))
                return
            try:
                self._do(steps, kind, data)
            except Exception as error:
                if steps.gone or self._over.is_set():
                    log.info("the leader is gone", cause=str(error))
                    return
                raise

    def _do(self, steps: Frames, kind: Kind, data: memoryview) -> None:
        executor = self._executor
        match kind:
            case Kind.PING:
                pass
            case Kind.RUN:
                assert executor.stage is not None, "a step before a load"
                inputs, wanted, activations = parse_step(data)
                executor.stage.run(inputs, activations, wanted)
                self.num_steps += 1
            case Kind.LOGITS:
                assert executor.stage is not None, "logits before a load"
                executor.stage.logits(parse_places(data))
            case Kind.COPY:
                executor.copy_blocks(*parse_copy(data))
            case Kind.LOAD:
                self._load(steps, parse(Load, data))
            case _:
                raise RankLost(f"the leader says {kind.name}")

    def _load(self, steps: Frames, load: Load) -> None:
        error, layout, page_bytes = "", "", 0
        self._agreed = not load.anew
        try:
            self._executor.load_as(load.spec, load.anew)
            pages = self._executor.pages
            assert pages is not None
            layout, page_bytes = pages.form.layout, pages.form.page_bytes
        except LoadFailed as failed:
            error = str(failed)
            if not self._agreed:
                steps.send(Kind.BLOCKS, pack(Answer(error=error)))
                self._pool(steps)
        steps.send(Kind.DONE, pack(Answer(error=error, layout=layout, page_bytes=page_bytes)))

    def _agree(self, own: int) -> int:
        """Raises LoadFailed: another rank can't load."""
        assert self._steps is not None
        self._agreed = True
        self._steps.send(Kind.BLOCKS, pack(Answer(own)))
        answer = self._pool(self._steps)
        if answer.error:
            raise LoadFailed(answer.error)
        return answer.blocks

    def _pool(self, steps: Frames) -> Answer:
        while True:
            kind, data = steps.receive(WORDS_MAX)
            if kind is Kind.POOL:
                return parse(Answer, data)
            if kind is not Kind.PING:
                raise RankLost(f"the leader says {kind.name}, not the size of the pool")

    # ---- pages

    def _serve_pages(self, frames: Frames) -> None:
        try:
            while True:
                kind, data = frames.receive()
                self._page_call(frames, kind, data)
        except PeerLost:
            pass  # the leader, or this process, is going
        except Exception as error:
            log.exception("pages failed", error)
            self.stop()  # the leader notices

    def _page_call(self, frames: Frames, kind: Kind, data: memoryview) -> None:
        call, content = parse_pages(data)
        pages = self._executor.pages
        if pages is None or call.turn != self._executor.turn:
            frames.send(Kind.DONE, pack(Answer(error="its memory is another one by now")))
            return
        shape = (len(call.blocks), call.num_layers, pages.form.page_bytes)
        if kind is Kind.READ:
            into = np.empty(shape, np.uint8)
            pages.read(call.blocks, into, call.first_layer)
            frames.send(Kind.PAGES, into.reshape(-1).data)
        else:
            pages.write(call.blocks, np.frombuffer(content, np.uint8).reshape(shape), call.first_layer)
            frames.send(Kind.PAGES)
