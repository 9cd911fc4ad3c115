"""The ranks of a stage as threads of one process, over real sockets and sums: a leader like any executor."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from shard_worker.ranks.executor import LeaderExecutor, RankExecutor
from shard_worker.ranks.follower import Follower
from shard_worker.ranks.leader import Followers
from shard_worker.ranks.processes import listening
from shard_worker.torch_executor import EngineConfig

PATIENCE_S = 30.0


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ranks were on several hosts: no memory is shared."""
    for module in ("leader", "follower"):
        monkeypatch.setattr(f"shard_worker.ranks.{module}.place", lambda: "")


class Ranks:
    """One stage. `failures`: what followers ended with."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: int,
        configs: dict[int, EngineConfig] | None = None,
        before: Callable[[str], None] = lambda _: None,
        silence_s: float = PATIENCE_S,
        rooms: Sequence[int] = (),
    ) -> None:
        """`configs`: of some ranks, if they differ; `before`: what is done at the address before that;
        `silence_s`: of the leader, as others bear it; `rooms`: for layers, of each rank."""
        self.failures: dict[int, BaseException] = {}
        self.changed = threading.Event()
        listener = listening("", ranks)
        host, port = listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.followers = Followers(ranks, listener, PATIENCE_S)
        self.followers.when_changed(self.changed.set)
        self.leader = LeaderExecutor(config, self.followers)
        executors = {
            rank: RankExecutor((configs or {}).get(rank, config), rank, ranks) for rank in range(1, ranks)
        }
        for executor, room in zip((self.leader, *executors.values()), rooms, strict=False):
            executor.take_room(room, 0.5, 0.75)
        self.followers.admit(self.leader.facts.digest, self.leader.settings, self.leader.device)
        before(self.address)
        self.others = {
            rank: Follower(executor, self.address, silence_s, PATIENCE_S)
            for rank, executor in executors.items()
        }
        self.threads = [
            threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in self.others
        ]
        for thread in self.threads:
            thread.start()

    def meet(self) -> "Ranks":
        assert self.changed.wait(PATIENCE_S), "the ranks do not meet"
        assert self.followers.whole, self.followers.cause
        self.leader.ready()
        return self

    def _follow(self, rank: int) -> None:
        try:
            self.others[rank].follow()
        except BaseException as error:
            self.failures[rank] = error

    def close(self) -> None:
        self.followers.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank goes on without its leader"

    def __enter__(self) -> "Ranks":
        return self.meet()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def stages(config: EngineConfig, ranks: int, num_stages: int) -> Iterator[list[LeaderExecutor]]:
    """The leaders of so many stages; afterwards all ranks have ended without a failure."""
    with ExitStack() as stack:
        made = []
        for _ in range(num_stages):
            made.append(Ranks(config, ranks).meet())
            stack.callback(made[-1].close)
        yield [stage.leader for stage in made]
    assert not any(stage.failures for stage in made)
