"""The other ranks as the leader knows them: who joins, what they are told and answer, and whether they live.

Rules: each follower has two connections, one for steps and one for pages. Commands go to all in one order,
from one thread; a thread each reads what they say, so that a lost one is noticed at once: closed, silent, or
wrong. One that is lost is lost for good, and the stage with it: the process ends, and with it all followers.
"""

import queue
import socket
import threading
from collections.abc import Callable

import torch

from chassis import log
from shard_worker.executor import LoadFailed
from shard_worker.ranks.collective import Collective, GroupCollective, meeting_point
from shard_worker.ranks.frames import Frames, Kind, PeerLost
from shard_worker.ranks.shared_memory import SharedCollective, new_memory, place
from shard_worker.ranks.words import Answer, BadWord, Hello, Welcome, pack, parse

PING_S = 1.0
HELLO_S = 2.0
HELLO_BYTES_MAX = 4096
COLLECTIVE_S = 60.0  # longer than any step: connections say earlier who is gone


class RankLost(Exception):
    """A rank of this stage is gone; the message says which and how."""


class Followers:
    def __init__(self, ranks: int, listener: socket.socket, silence_s: float) -> None:
        """`listener`: where they join; it is closed when they are all here."""
        self.ranks = ranks
        self.cause = ""  # why the stage is lost
        self._silence_s = silence_s
        self._device = torch.device("cpu")
        self._listener = listener
        self._host, self._family = str(listener.getsockname()[0]), listener.family
        self._steps: dict[int, Frames] = {}
        self._pages: dict[int, Frames] = {}
        self._answers: dict[int, queue.SimpleQueue[Answer | None]] = {}
        self._collective: Collective | None = None
        self._store: object = None
        self._places: dict[int, str] = {}
        self._rooms: dict[int, int] = {}
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._changed: list[Callable[[], None]] = []

    @property
    def whole(self) -> bool:
        """All ranks are here."""
        return self._collective is not None

    @property
    def collective(self) -> Collective:
        assert self._collective is not None, "not all ranks are here"
        return self._collective

    def when_changed(self, do: Callable[[], None]) -> None:
        """All are here, or one is lost: `do` is called by whatever thread notices."""
        self._changed.append(do)

    def _tell_changed(self) -> None:
        for do in self._changed:
            do()

    # ---- joining

    def admit(self, digest: str, settings: str, device: torch.device) -> None:
        """Takes them in, on a thread of its own. `device`: that the leader computes on."""
        self._device = device
        threading.Thread(target=self._admit, args=(digest, settings), name="ranks", daemon=True).start()

    def _admit(self, digest: str, settings: str) -> None:
        try:
            while not self._all_joined:
                sock, _ = self._listener.accept()
                self._meet(sock, digest, settings)
            self._listener.close()
            self._begin()
        except (OSError, RuntimeError, PeerLost, RankLost) as error:
            self.lose(f"the ranks could not meet: {error}")

    @property
    def _all_joined(self) -> bool:
        return self._steps.keys() == self._pages.keys() == set(range(1, self.ranks))

    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [rank for rank in range(1, self.ranks) if rank not in self._steps or rank not in self._pages]

    def _meet(self, sock: socket.socket, digest: str, settings: str) -> None:
        try:
            frames = Frames(sock, HELLO_S)
            kind, data = frames.receive(HELLO_BYTES_MAX)
            if kind is not Kind.HELLO:
                raise PeerLost("does not say hello")
            hello = parse(Hello, data)
            if why := self._refusal(hello, digest, settings):
                log.warning("rank refused", rank=hello.rank, pid=hello.pid, reason=why)
                frames.send(Kind.REFUSED, pack(Answer(error=why)))
                frames.close()
                return
        except (OSError, PeerLost, BadWord) as error:
            log.warning("a stranger among the ranks", error=str(error))
            sock.close()
            return
        channel = self._pages if hello.pages else self._steps
        if (before := channel.get(hello.rank)) is not None:
            before.close()
        channel[hello.rank] = frames
        self._places[hello.rank], self._rooms[hello.rank] = hello.place, hello.layers_max
        if not hello.pages:
            log.info("rank joined", rank=hello.rank, pid=hello.pid, peer=frames.peer)

    @property
    def hosts(self) -> list[str]:
        """Where the others are, by rank."""
        return [frames.peer.rpartition(":")[0] for _, frames in sorted(self._steps.items())]

    def least_room(self, own: int) -> int:
        """For layers, of all ranks; 0: for all layers."""
        return min((room for room in (own, *self._rooms.values()) if room), default=0)

    def _refusal(self, hello: Hello, digest: str, settings: str) -> str:
        if hello.ranks != self.ranks:
            return f"tensor_parallel is {hello.ranks} there, {self.ranks} at the leader"
        if not 0 < hello.rank < self.ranks:
            return f"rank {hello.rank}: 1 to {self.ranks - 1}"
        if hello.digest != digest:
            return f"the model's digest is {hello.digest[:16]} there, {digest[:16]} at the leader"
        if hello.settings != settings:
            return f"{hello.settings} there, {settings} at the leader"
        channel = self._pages if hello.pages else self._steps
        known = channel.get(hello.rank)
        return f"rank {hello.rank} is here already" if known is not None and not known.gone else ""

    def _begin(self) -> None:
        """Raises PeerLost, RuntimeError, OSError."""
        shared = self._in_one_place()
        self._collective = self._met_in_memory() if shared else self._met_by_network()
        log.info("ranks meet", by="shared memory" if shared else "torch.distributed")
        self._tell_changed()

    def _in_one_place(self) -> bool:
        own = place() if self._device.type == "cpu" else ""
        return bool(own) and set(self._places.values()) == {own}

    def _met_in_memory(self) -> Collective:
        """Raises PeerLost, OSError, RankLost."""
        with new_memory(self.ranks) as path:
            self._welcome(Welcome(0, str(path)))
            self.answers()  # all have it open
            return SharedCollective(path, 0, self.ranks, COLLECTIVE_S)

    def _met_by_network(self) -> Collective:
        """Raises PeerLost, RuntimeError, OSError."""
        meeting = socket.create_server((self._host, 0), family=self._family, backlog=self.ranks)
        port = meeting.getsockname()[1]
        self._store = meeting_point(self._host, port, self.ranks, COLLECTIVE_S, meeting)
        self._welcome(Welcome(port, ""))
        reached = self._steps[1].local_host  # it may listen everywhere
        return GroupCollective(self._store, 0, self.ranks, reached, COLLECTIVE_S, self._device)

    def _welcome(self, word: Welcome) -> None:
        """Raises PeerLost."""
        for channel in (self._pages, self._steps):
            for frames in channel.values():
                frames.allow(self._silence_s)
                frames.send(Kind.WELCOME, pack(word))
        for rank, frames in self._steps.items():
            self._answers[rank] = queue.SimpleQueue()
            threading.Thread(target=self._hear, args=(rank, frames), name=f"rank {rank}", daemon=True).start()
        threading.Thread(target=self._ping, name="pings", daemon=True).start()

    # ---- living

    def _hear(self, rank: int, frames: Frames) -> None:
        try:
            while True:
                kind, data = frames.receive()
                if kind is Kind.PING:
                    continue
                if kind not in (Kind.BLOCKS, Kind.DONE):
                    raise PeerLost(f"says {kind.name}")
                self._answers[rank].put(parse(Answer, data))
        except (PeerLost, BadWord) as error:
            self.lose(f"rank {rank} {error}")

    def _ping(self) -> None:
        while not self._over.wait(PING_S):
            for rank, frames in self._steps.items():
                try:
                    frames.send(Kind.PING)
                except PeerLost as error:
                    self.lose(f"rank {rank} {error}")

    def lose(self, cause: str) -> None:
        """From any thread; the first cause counts. Whoever waits for a rank is woken."""
        with self._changing:
            if self._over.is_set():
                return
            self.cause = cause
            self._over.set()
        log.warning("rank lost", cause=cause)
        self._hang_up()
        self._tell_changed()

    def close(self) -> None:
        """All go with the connection; nothing of it counts as a loss."""
        with self._changing:
            if self._over.is_set():
                return
            self.cause = "stopping"
            self._over.set()
        self._hang_up()

    def _hang_up(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        for channel in (self._steps, self._pages):
            for frames in channel.values():
                frames.close()
        for waiting in self._answers.values():
            waiting.put(None)
        if self._collective is not None:
            self._collective.abort()

    # ---- commands, from the compute thread

    def tell(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Raises RankLost."""
        for rank, frames in self._steps.items():
            try:
                frames.send(kind, *parts)
            except PeerLost as error:
                self.lose(f"rank {rank} {error}")
                raise RankLost(self.cause) from None

    def agree(self, own: int) -> int:
        """The least that any rank has room for. Raises LoadFailed, RankLost."""
        answers = self.answers()
        errors = [f"rank {rank}: {answer.error}" for rank, answer in answers if answer.error]
        least = 0 if errors else min(own, *(answer.blocks for _, answer in answers))
        self.tell(Kind.POOL, pack(Answer(least, error="; ".join(errors))))
        if errors:
            raise LoadFailed("; ".join(errors))
        return least

    def agree_on_none(self) -> None:
        """The leader can't load. Raises RankLost."""
        self.answers()
        self.tell(Kind.POOL, pack(Answer(error="the leader can't load it")))

    def answers(self) -> list[tuple[int, Answer]]:
        """One of each, by rank. Raises RankLost."""
        found = []
        for rank, waiting in sorted(self._answers.items()):
            answer = waiting.get()
            if answer is None:
                raise RankLost(self.cause)
            found.append((rank, answer))
        return found

    # ---- pages, from the copies' thread

    def ask_pages(self, rank: int, kind: Kind, *parts: bytes | memoryview) -> memoryview:
        """Raises RankLost, also when it refuses."""
        frames = self._pages[rank]
        try:
            frames.send(kind, *parts)
            answered, data = frames.receive()
            if answered is Kind.PAGES:
                return data
            error = parse(Answer, data).error if answered is Kind.DONE else answered.name
        except (PeerLost, BadWord) as gone:
            self.lose(f"rank {rank} {gone}")
            raise RankLost(self.cause) from None
        raise RankLost(f"rank {rank}: {error}")
