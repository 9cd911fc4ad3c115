"""A stage whose ranks are on two hosts: one of them falls silent, nothing is refused, and nobody is told.

All its ranks end within what is promised, those on the silent host too; a spare with ranks of its own takes
over, and no request fails. The sums that ranks wait in would hold them for a minute.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from shard_worker.ranks.worker import END_WITHIN_S
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.hosts.lab import ROOT, Host, Lab
from tests.hosts.rig import Started, lines_of
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence

OUTPUT_LEN = 150
SILENCE_S = 2.0
BOUND_S = SILENCE_S + 2.0 + END_WITHIN_S
NUM_BLOCKS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make_small(path, "llama", max_position_embeddings=512)
    tiny_models.save_tokenizer(path, tiny_models.SMALL_VOCAB)
    return path


def expected(folder: Path) -> list[Sequence]:
    """Greedy and drawn, with what one process says to them."""
    draw = np.random.default_rng(7)
    made = [
        Sequence(draw.integers(3, 80, n).tolist(), OUTPUT_LEN, temperature=float(i % 2), seed=i)
        for i, n in enumerate((3, 20, 11))
    ]
    config = EngineConfig(str(folder), num_blocks=NUM_BLOCKS, digest_cache_dir=str(folder / "digests"))
    Driver([TorchExecutor(config)], (4,), block_size=16).run(made)
    return made


class Rig:
    def __init__(self, lab: Lab, folder: Path, run: Path, stack: ExitStack) -> None:
        """`folder`: the model's; `run`: for what is said and kept."""
        self._folder, self._run, self._stack = folder, run, stack
        self._bus = f"nats://{lab.hosts[0].address}:4222"
        self._count = 0

    def start(self, host: Host, *words: str | Path) -> Started:
        self._count += 1
        argv = (sys.executable, "-m", *words)
        log = self._run / f"{host.number}.{self._count}.said"
        digests = {"SHOAL_SHARD_WORKER_DIGEST_CACHE_DIR": str(self._folder / "digests")}
        started = Started(host, argv, log, ROOT, **digests)
        self._stack.callback(started.end)
        return started

    def up(self, host: Host) -> Started:
        where = ("--listen", host.address, "--run-dir", self._run / "up")
        return self.start(
            host, "shoal", "up", *where, "--workers", "0", "--stages", "1", "--model", self._folder
        )

    def rank(self, host: Host, *words: str) -> Started:
        """`words`: of its place among the ranks."""
        model = ("--model", self._folder, "--num-blocks", str(NUM_BLOCKS), "--nats-url", self._bus)
        where = ("--listen", f"tcp://{host.address}:0", "--rpc-listen", f"{host.address}:0")
        silence = ("--tensor-parallel", "2", "--rank-silence-ms", str(round(SILENCE_S * 1000)))
        leave = ("--drain-wait-ms", "500")
        return self.start(host, "shard_worker", *model, *where, *silence, *leave, *words)


WAYS = ["follower", *(pytest.param(way, marks=pytest.mark.slow) for way in ("leader", "to", "from"))]


@pytest.mark.parametrize("silent", WAYS)
def test_a_silent_host_of_one_rank_is_a_dead_stage(
    three: Lab, folder: Path, tmp_path: Path, silent: str, record_property: Callable[[str, object], None]
) -> None:
    """The follower's host, or the leader's; or only what is said to, or from, the follower's."""
    first, second, third = three.hosts
    led_from, followed_from = (second, first) if silent == "leader" else (first, second)
    meet_at = f"{led_from.address}:7100"
    with ExitStack() as stack:
        made = Rig(three, folder, tmp_path, stack)
        up = made.up(first)
        ranks = [
            made.rank(led_from, "--ranks-listen", meet_at),
            made.rank(followed_from, "--rank", "1", "--leader", meet_at),
        ]
        known = tmp_path / "known"
        known.write_text(lines_of(expected(folder)))
        up.wait_for("serving gRPC")
        ranks[0].wait_for('"by":"torch.distributed"')
        clients = made.start(first, "tests.hosts.asking_known", "127.0.0.1:50051", known)
        made.rank(third)  # the spare: it starts its other rank itself
        clients.wait_for("begun")
        match silent:
            case "to":
                three.cut_way(first, second)
            case "from":
                three.cut_way(second, first)
            case _:
                three.cut(second)
        cut_at = time.monotonic()
        ends = [(rank.wait(BOUND_S), round(time.monotonic() - cut_at, 2)) for rank in ranks]
        record_property(f"ends.{silent}", ends)
        assert ends[0][0] == 1, "a leader that has lost a rank says so"
        assert clients.wait() == 0, clients.said
        assert clients.said.endswith("right\n")
