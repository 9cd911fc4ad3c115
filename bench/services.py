"""What Shoal's own services take beside the compute: processor time per output token, by process.

W1 to W3 through the gRPC front, one stage of two threads. A worker is split into its loop, the first thread,
and all others, which compute; the client is this process. Waiting is time that a thread could run and had no
core: where as many threads compute as there are cores, it says how much they stand in each other's way.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load import WORKLOADS, draw_prompts
from bench.peers import weights
from bench.peers.contestants import Shoal, ShoalSetting
from bench.peers.match import VOCAB_SIZE, warm_up
from bench.quiet import watch_others
from bench.results_file import Sample, table, write

SERVICES = ("gateway", "batcher", "kvstore", "nats", "worker loop", "client")  # all but the compute
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Setting:
    rounds: int = 5
    workloads: tuple[str, ...] = ("W1", "W2", "W3")
    row: str = "bfloat16"
    sequences_max: int = 64
    stream_interval: int = 1  # every token told by itself: what the services can be asked at most


@dataclass(frozen=True, slots=True)
class Used:
    """Of some threads together, since they began."""

    busy_ns: int = 0
    waiting_ns: int = 0
    switches: int = 0

    def __add__(self, other: "Used") -> "Used":
        return Used(
            self.busy_ns + other.busy_ns,
            self.waiting_ns + other.waiting_ns,
            self.switches + other.switches,
        )

    def __sub__(self, other: "Used") -> "Used":
        return Used(
            self.busy_ns - other.busy_ns,
            self.waiting_ns - other.waiting_ns,
            self.switches - other.switches,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    tokens_per_s: float
    first_ms: float  # median over the requests
    tokens: int
    used: Mapping[str, Used]

    def us(self, name: str) -> float:
        return self.used[name].busy_ns / 1000 / self.tokens

    @property
    def services_us(self) -> float:
        return sum(map(self.us, SERVICES))


def _thread(folder: Path) -> Used:
    busy_ns, waiting_ns, _ = map(int, (folder / "schedstat").read_text().split())
    lines = (folder / "status").read_text().splitlines()
    switches = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return Used(busy_ns, waiting_ns, switches)


def _threads(pid: int) -> dict[int, Used]:
    return {int(f.name): _thread(f) for f in Path(f"/proc/{pid}/task").iterdir()}


def used_by(pids: Mapping[str, int]) -> dict[str, Used]:
    """By service, for a deployment of one worker."""
    found: dict[str, Used] = dict.fromkeys((*SERVICES, COMPUTE), Used())
    for child, pid in {**pids, "client": os.getpid()}.items():
        threads = _threads(pid)
        name = child.rstrip("0123456789-_")
        if name.startswith(("worker", "shard_worker")):
            found["worker loop"] += threads.pop(pid)
            name = COMPUTE
        for used in threads.values():
            found[name] += used
    return found


async def _turn(shoal: Shoal, name: str, seed: int) -> Turn:
    workload = WORKLOADS[name]
    prompts = draw_prompts(workload, seed, VOCAB_SIZE)
    before = used_by(shoal.pids)
    ran = await shoal.run(prompts, workload.output_tokens)
    after = used_by(shoal.pids)
    tokens = sum(r.tokens for r in ran.requests)
    first = sorted(r.first_s for r in ran.requests)[len(ran.requests) // 2]
    return Turn(tokens / ran.seconds, 1000 * first, tokens, {n: after[n] - before[n] for n in after})


async def measure(setting: Setting) -> tuple[dict[str, list[Turn]], float]:
    """Turns by workload, and the cores that others used meanwhile."""
    form = weights.ROWS[setting.row]["shoal"]
    shoal = Shoal(
        ShoalSetting(
            str(form.weights()),
            sequences_max=setting.sequences_max,
            worker_flags=form.flags,
            stream_interval=setting.stream_interval,
        )
    )
    turns: dict[str, list[Turn]] = {name: [] for name in setting.workloads}
    await shoal.start()
    try:
        await warm_up(shoal, [WORKLOADS[name] for name in setting.workloads])
        with watch_others() as others:
            for _ in range(setting.rounds):
                for name in setting.workloads:
                    turns[name].append(await _turn(shoal, name, time.time_ns() & 0xFFFFFF))
    finally:
        await shoal.stop()
    return turns, others.cores


def _rows(name: str, turns: Sequence[Turn]) -> tuple[list[list[str]], dict[str, Sample]]:
    key = f"services.{name.lower()}"
    values = {
        f"{key}.tokens_per_s": Sample(tuple(t.tokens_per_s for t in turns), "tokens/s"),
        f"{key}.first_ms": Sample(tuple(t.first_ms for t in turns), "ms"),
        f"{key}.us": Sample(tuple(t.services_us for t in turns), "us"),
    }
    rows = []
    for who in (*SERVICES, COMPUTE):
        busy = Sample(tuple(t.us(who) for t in turns), "us")
        waiting = Sample(tuple(t.used[who].waiting_ns / 1000 / t.tokens for t in turns), "us")
        switches = Sample(tuple(t.used[who].switches / t.tokens for t in turns), "")
        values[f"{key}.{who.replace(' ', '_')}_us"] = busy
        rows.append([name, who, str(busy), str(waiting), str(switches)])
    rows.append([name, "all services", str(values[f"{key}.us"]), "", ""])
    return rows, values


async def main(setting: Setting) -> None:
    turns, others_cores = await measure(setting)
    rows = [["workload", "who", "busy per token", "waiting per token", "switches per token"]]
    values: dict[str, Sample] = {}
    for name, its in turns.items():
        more, its_values = _rows(name, its)
        rows += more
        values |= its_values
    sys.stdout.write(table(rows) + "\n")
    for name in turns:
        for what in ("tokens_per_s", "first_ms"):
            full = f"services.{name.lower()}.{what}"
            sys.stdout.write(f"{full}: {values[full]}\n")
    sys.stdout.write(f"others used {others_cores:.2f} cores\n")
    notes = {"row": setting.row, "stream_interval": setting.stream_interval}
    write("services", values, notes | {"others_cores": round(others_cores, 2)})
