"""A stage of several ranks behaves as one worker's: its pool, pages, refusals, and how it ends."""

import asyncio
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shard_worker.__main__ import gpu_of, measure_ranks
from shard_worker.attention.interface import LayerKv
from shard_worker.block_sums import checksums_of
from shard_worker.config import Config
from shard_worker.device import choice
from shard_worker.executor import LoadFailed, StageSpec
from shard_worker.model.stage import NO_BYTES
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.ranks.collective import GroupCollective
from shard_worker.ranks.executor import RankExecutor
from shard_worker.ranks.follower import Follower
from shard_worker.ranks.frames import Frames, Kind, PeerLost
from shard_worker.ranks.leader import RankLost
from shard_worker.ranks.pages import LAYOUT_LEN_MAX, RanksPages
from shard_worker.ranks.processes import RankProcesses, listening
from shard_worker.ranks.stage import RankStage
from shard_worker.ranks.words import Answer, BadWord, Hello, Welcome, pack, pack_step, parse, parse_step
from shard_worker.ranks.worker import END_WITHIN_S, FollowerService, end_within
from shard_worker.torch_executor import EngineConfig
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence
from tests.shard_worker.ranks_rig import PATIENCE_S, Ranks, apart, stages

WHOLE = StageSpec(0, 1, 0, 4, 4, 8, 64)
PROMPT = [5, 9, 2, 30, 71, 12, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 query heads over 3 KV heads."""
    path = tmp_path_factory.mktemp("tiny")
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 96}
    tiny_models.make_small(path, "llama", **heads)
    tiny_models.save_tokenizer(path, tiny_models.SMALL_VOCAB)
    return path


def config(folder: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "engine": "torch",
        "num_blocks": 40,
        "digest_cache_dir": str(folder / "digests"),
    } | changes
    return EngineConfig(str(folder), **settings)


@pytest.fixture
def pair(folder: Path) -> Any:
    with Ranks(config(folder), 2) as made:
        yield made


# ---- memory ------------------------------------------------------------------------------------------


def test_the_pool_is_that_of_the_rank_with_the_least_room(folder: Path) -> None:
    """Rank 1 has two of the three KV heads."""
    with stages(config(folder, num_blocks=None, kv_memory_mb=1), 2, 1) as (leader,):
        of_two_heads = 4 * 2 * 2 * 4 * 8 * 4
        assert leader.load(WHOLE).num_blocks == (1 << 20) // of_two_heads
        assert not leader.load(WHOLE).kv_allocated
        assert leader.load(replace(WHOLE, block_size_tokens=8)).num_blocks == (1 << 20) // of_two_heads // 2


def test_there_is_room_for_as_many_layers_as_at_the_rank_with_the_least(folder: Path) -> None:
    for rooms, least in (((0, 0, 0), 0), ((4, 0, 3), 3), ((0, 2, 9), 2), ((1, 0, 0), 1)):
        with Ranks(config(folder), 3, rooms=rooms) as made:
            facts = made.leader.facts
            assert (facts.layers_max, facts.head_layers, facts.ends_layers) == (least, 0.5, 0.75)


def test_what_a_layer_takes_is_measured_with_the_slowest_rank(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that works for long takes no time of the leader's processor. It is measured once."""
    ran: list[int] = []
    run = RankStage.run

    def slow(stage: RankStage, *step: Any) -> memoryview:
        if type(stage) is RankStage:
            ran.append(1)
            time.sleep(0.01)
        return run(stage, *step)

    monkeypatch.setattr(RankStage, "run", slow)
    settings = Config(model=str(folder), engine="torch", digest_cache_dir=str(tmp_path))
    with Ranks(config(folder), 2) as made:
        measure_ranks(settings, made.leader, made.followers.hosts)
        times = len(ran)
        measure_ranks(settings, made.leader, made.followers.hosts)
        assert len(ran) == times > 0
        assert made.leader.facts.layer_us > 10_000 and made.leader.facts.head_cost_layers > 0
        measure_ranks(settings, made.leader, ["198.51.100.7"])
        assert len(ran) > times


def test_a_rank_that_cannot_load_is_named_and_nothing_is_lost(folder: Path) -> None:
    with Ranks(config(folder), 2, {1: config(folder, num_blocks=1 << 25)}) as made:
        for _ in range(2):
            with pytest.raises(LoadFailed, match="rank 1: kv_memory_mb = 512: 33554432 blocks"):
                made.leader.load(WHOLE)
            assert made.leader.pages is None
        assert not made.followers.cause


def test_a_leader_that_cannot_load_leaves_the_others_as_they_were(folder: Path) -> None:
    with Ranks(config(folder, num_blocks=1 << 25), 2, {1: config(folder)}) as made:
        for _ in range(2):
            with pytest.raises(LoadFailed, match="^kv_memory_mb"):
                made.leader.load(WHOLE)
        assert not made.followers.cause


def test_layers_move_and_answers_stay(pair: Ranks) -> None:
    first = Driver([pair.leader], (4,)).run([Sequence(PROMPT, 6)])
    pair.leader.load(StageSpec(0, 2, 0, 2, 4, 8, 64))
    assert Driver([pair.leader], (4,)).run([Sequence(PROMPT, 6)]) == first
    assert Driver([pair.leader], (4,), block_size=2, step_tokens=5).run([Sequence(PROMPT, 6)], 3) == first


def test_blocks_are_copied_on_all_ranks(pair: Ranks) -> None:
    driver = Driver([pair.leader], (4,))
    whole, half = Sequence(PROMPT, 6), Sequence(PROMPT, 6)
    driver.run([whole])
    copied = [driver.free.pop() for _ in whole.table]
    pair.leader.copy_blocks(np.array(whole.table, np.uint32), np.array(copied, np.uint32))
    half.table, half.computed = copied, len(PROMPT) - 1
    driver.run([Sequence(PROMPT, 1)])  # all ranks have copied when they have done what came after it
    for layer in layers_of(pair):
        layer.keys[:, whole.table] = 7.0
    assert driver.run([half]) == [whole.output]


def layers_of(ranks: Ranks) -> list[LayerKv]:
    """Of all ranks."""
    executors: list[RankExecutor] = [ranks.leader, *(f._executor for f in ranks.others.values())]
    found = []
    for executor in executors:
        assert executor._resident is not None
        found += executor._resident.kv
    return found


def test_pages_hold_all_heads(folder: Path) -> None:
    """What one stage computed goes on in another, in other blocks; every rank's bits count."""
    with Ranks(config(folder), 2) as one, Ranks(config(folder), 2) as two:
        drivers = [Driver([ranks.leader], (4,)) for ranks in (one, two)]
        there, here = Sequence(PROMPT, 6), Sequence(PROMPT, 6)
        drivers[0].run([there])
        source, target = one.leader.pages, two.leader.pages
        assert source is not None and target is not None
        form = source.form
        assert form == target.form and form.page_bytes == 3 * 2 * 4 * 8 * 4
        assert form.layout == "float32.heads.1x8x4+float32.heads.2x8x4"
        content = np.empty((len(there.table), 4, form.page_bytes), np.uint8)
        source.read(there.table, content)
        here.table = [drivers[1].free.pop() for _ in there.table]
        for first in (0, 2):
            target.write(here.table, content[:, first : first + 2], first)
        again = np.empty_like(content[:, 1:])
        target.read(here.table, again, 1)
        assert (again == content[:, 1:]).all()
        here.computed = len(PROMPT) - 1
        assert drivers[1].run([here]) == [there.output]
        before = checksums_of(source, there.table)
        layers_of(one)[-1].values[0, there.table[1], 0, 0] += 1.0  # of the other rank
        after = checksums_of(source, there.table)
        assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 1


def test_a_layout_of_many_ranks_has_a_name_that_messages_take(pair: Ranks) -> None:
    pair.leader.load(WHOLE)
    local = pair.leader.pages
    assert local is not None
    forms = [
        RanksPages(
            local, pair.followers, 1, [Answer(layout=f"float32.heads.{n}x64x16", page_bytes=8)] * 63
        ).form
        for n in (1, 2)
    ]
    assert all(len(form.layout) <= LAYOUT_LEN_MAX for form in forms)
    assert forms[0].layout != forms[1].layout
    assert forms[0].page_bytes == local.form.page_bytes + 63 * 8


def test_pages_of_memory_that_is_gone_are_refused(pair: Ranks) -> None:
    pair.leader.load(WHOLE)
    old = pair.leader.pages
    pair.leader.load(replace(WHOLE, block_size_tokens=8))
    assert old is not None
    with pytest.raises(RankLost, match="its memory is another one by now"):
        old.read([0], np.empty((1, 4, old.form.page_bytes), np.uint8))
    assert not pair.followers.cause


# ---- refusals ----------------------------------------------------------------------------------------


def test_what_cannot_be_shared_out_is_refused_at_the_start(folder: Path) -> None:
    for changes, ranks, match in (
        ({}, 10, "tensor_parallel 10: the model has 9 query heads .num_attention_heads.: at most 9 ranks"),
        ({"engine": "transformers"}, 2, "tensor_parallel 2: a model run by the transformers library"),
    ):
        with pytest.raises(LoadFailed, match=match):
            RankExecutor(config(folder, **changes), 1, ranks)


def test_ranks_on_gpus_take_one_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as much of it for weights as one process; and only what computes there."""
    monkeypatch.setattr(choice, "found", lambda: choice.Found("2", "13.0", 4))
    assert [gpu_of(device) for device in ("cpu", "cuda", "cuda:2", "auto")] == [None, 0, 2, 0]
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    for gpu in (None, 1):
        with listening("", 3) as listener:
            RankProcesses(3, listener, ["--device", "cuda:1", "--tensor-parallel", "3"], gpu)
    devices = [[one[i + 1] for i, word in enumerate(one) if word == "--device"][-1] for one in commands]
    assert devices == ["cuda:1", "cuda:1", "cuda:2", "cuda:3"]
    executor = RankExecutor(config(folder, device="cuda:1", engine="auto"), 1, 2)
    assert executor.room(1) == RankExecutor(config(folder), 1, 2).room(1) != executor.room(2)
    gpu_memory = SimpleNamespace(total_memory=5 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu_memory)
    assert executor.room(0) == executor.room(4)
    with pytest.raises(LoadFailed, match="tensor_parallel 2: device cuda:1: engine torch computes"):
        RankExecutor(config(folder, device="cuda:1"), 1, 2)


def test_all_ranks_sum_up_as_their_devices_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs none takes memory that processors share, though all are on one host."""
    asked: list[torch.device] = []
    made: Any = GroupCollective.__init__

    def init(self: GroupCollective, *args: Any) -> None:
        asked.append(args[-1])
        made(self, *args[:-1], torch.device("cpu"))

    monkeypatch.setattr(GroupCollective, "__init__", init)
    monkeypatch.setattr(RankExecutor, "device", property(lambda self: torch.device("cuda", self.rank)))
    with Ranks(config(folder), 3) as ranks:
        ranks.leader.load(WHOLE)
        assert "device cuda" in ranks.leader.settings
    assert sorted(map(str, asked)) == ["cuda:0", "cuda:1", "cuda:2"]


def test_weights_that_are_no_numbers_are_refused_by_the_rank_that_has_them(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with Ranks(config(tmp_path), 2) as made:
        with pytest.raises(LoadFailed, match="rank 1: .*: down of layer 2 holds what is no number"):
            made.leader.load(WHOLE)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": "bfloat16"}, "the leader refuses: dtype bfloat16, .* there, dtype float32"),
        ({"quantize": "int8"}, "the leader refuses: the model's digest is .* there, .* at the leader"),
    ],
)
def test_a_rank_with_other_settings_is_refused(folder: Path, changes: dict[str, Any], match: str) -> None:
    made = Ranks(config(folder), 2, {1: config(folder, **changes)})
    made.threads[0].join(PATIENCE_S)
    made.close()
    with pytest.raises(RankLost, match=match):
        raise made.failures[1]


def test_garbage_at_the_door_keeps_nobody_out(folder: Path) -> None:
    def knock(address: str) -> None:
        host, _, port = address.rpartition(":")
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"SRK1\x01\0\0\0" + b"\xff" * 8,
            b"",
            b"SRK1\x09\0\0\0" + bytes(8),
        ):
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(said)
        hello = Hello(1, 3, False, 1, "a", "b", "", 0)
        with socket.create_connection((host, int(port))) as sock:
            frames = Frames(sock, PATIENCE_S)
            frames.send(Kind.HELLO, pack(hello))
            kind, data = frames.receive()
            assert kind is Kind.REFUSED
            assert parse(Answer, data).error == "tensor_parallel is 3 there, 2 at the leader"

    with Ranks(config(folder), 2, before=knock) as made:
        assert made.leader.load(WHOLE).num_blocks == 40


def test_what_is_no_word() -> None:
    for data in (
        b"",
        b"{}",
        b"[]",
        b'{"rank": "1"}',
        b"\xff",
        b'{"blocks":1.5,"error":"","layout":"","page_bytes":0}',
    ):
        with pytest.raises(BadWord):
            parse(Answer, memoryview(data))
    for data in (b"", bytes(24)[:-1], b"\xff" * 64, bytes(64)):
        with pytest.raises(BadWord):
            parse_step(memoryview(data))


def test_silence_and_closed_doors_are_told_apart() -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        assert sock.family == socket.AF_UNIX
    server = socket.create_server(("127.0.0.1", 0))
    near = Frames(socket.create_connection(server.getsockname()), 0.05)
    far = Frames(server.accept()[0], None)
    with pytest.raises(PeerLost, match="silent for 0.05 s"):
        near.receive()
    assert not near.gone
    far.close()
    near.allow(PATIENCE_S)
    with pytest.raises(PeerLost, match="closed its connection"):
        near.receive()
    assert near.gone
    for sock in (ours, theirs, server):
        sock.close()
    near.close()


# ---- the end -----------------------------------------------------------------------------------------


def test_a_lost_rank_ends_a_step_and_every_later_one(pair: Ranks) -> None:
    driver = Driver([pair.leader], (4,))
    driver.run([Sequence(PROMPT, 2)])
    noticed = threading.Event()
    pair.followers.when_changed(noticed.set)
    pair.others[1].stop()
    assert noticed.wait(PATIENCE_S)
    assert "rank 1 closed its connection" in pair.followers.cause
    for _ in range(2):
        with pytest.raises((RankLost, RuntimeError)):
            driver.run([Sequence(PROMPT, 2)])
    with pytest.raises((RankLost, LoadFailed)):
        pair.leader.load(replace(WHOLE, block_size_tokens=2))


def test_who_waits_in_a_sum_for_a_silent_leader_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the leader's host were gone, and nothing closed. Of itself the sum waits for a minute."""
    apart(monkeypatch)
    lost = threading.Event()
    with Ranks(config(folder), 2, silence_s=0.5) as made:
        made.others[1].when_lost(lost.set)
        made.leader.load(WHOLE)
        inputs = probe_inputs([ProbeRow(PROMPT, 0, [0, 1])], 4)
        made.followers.tell(Kind.RUN, *pack_step(inputs, None, NO_BYTES))
        monkeypatch.setattr(made.followers._steps[1], "send", lambda *_: None)  # no pings either
        made.threads[0].join(PATIENCE_S / 3)
        assert not made.threads[0].is_alive() and lost.is_set() and not made.failures


@pytest.fixture
def alarm() -> Iterator[None]:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_limit_to_the_end_is_not_put_off(alarm: None) -> None:
    for seconds in (60.0, 120.0):
        end_within(seconds)
    left, again = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left <= 60.0 and not again


def test_who_loses_the_leader_while_ranks_meet_does_not_wait_for_them(
    alarm: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing wakes who makes a connection to a host that is gone."""
    gone = threading.Event()

    def nowhere(*_: object) -> None:
        assert gone.wait(PATIENCE_S)
        raise RuntimeError("no store there")

    monkeypatch.setattr("shard_worker.ranks.follower.meeting_point", nowhere)
    door = socket.create_server(("127.0.0.1", 0))
    host, port = door.getsockname()
    kept: list[Frames] = []

    def lead() -> None:
        for _ in range(2):
            kept.append(Frames(door.accept()[0], PATIENCE_S))
            assert kept[-1].receive()[0] is Kind.HELLO
            kept[-1].send(Kind.WELCOME, pack(Welcome(1, "")))

    leading = threading.Thread(target=lead, daemon=True)
    leading.start()
    follower = Follower(RankExecutor(config(folder), 1, 2), f"{host}:{port}", 0.5, PATIENCE_S)
    service = FollowerService(follower)
    asyncio.run(asyncio.wait_for(service.run(), PATIENCE_S / 2))
    assert not service.ready and 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= END_WITHIN_S
    gone.set()
    leading.join(PATIENCE_S)
    for frames in kept:
        frames.close()
    door.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel: 1 to 64"),
        ({"tensor_parallel": 2, "executor": "fake"}, "tensor_parallel: the fake model has one rank"),
        ({"rank": 1, "leader": "host:1"}, "rank: 0 to 0, tensor_parallel is 1"),
        ({"tensor_parallel": 2, "rank": 1}, "leader: every rank but 0 has one"),
        ({"tensor_parallel": 2, "leader": "host:1"}, "leader: every rank but 0 has one"),
        ({"tensor_parallel": 2, "rank": 1, "leader": "host"}, "leader: host:port"),
        ({"tensor_parallel": 2, "ranks_listen": "host:70000"}, "ranks_listen: host:port"),
        ({"tensor_parallel": 2, "rank_silence_ms": 1}, "rank_silence_ms: at least 2000"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=f"^{says}"):
        Config(**settings)
