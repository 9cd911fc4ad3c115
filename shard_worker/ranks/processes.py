"""The other ranks of a stage as processes of this host, started by the leader; they die with it.

Each is this very command with a rank of its own. The kernel ends them when the leader's process ends, however
that happens; nothing of ours runs between fork and exec.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from chassis.service import LAUNCHER_PID

LOCAL = "127.0.0.1:0"


def listening(address: str, ranks: int) -> socket.socket:
    """Where ranks join: host:port, port 0 any free one. Raises OSError."""
    host, _, port = (address or LOCAL).rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=2 * ranks + 8)


class RankProcesses:
    def __init__(self, ranks: int, listener: socket.socket, words: Sequence[str], gpu: int | None) -> None:
        """`words`: how this process was called; `gpu`: that it computes on, if it is one: the others take the
        next ones. To be made by a thread that lives as long as the process: the kernel watches that."""
        host, port = listener.getsockname()[:2]
        env = {**os.environ, LAUNCHER_PID: str(os.getpid())}
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "shard_worker", *words),
                    *("--rank", str(rank), "--leader", f"{host}:{port}", "--metrics-address="),
                    *([] if gpu is None else ["--device", f"cuda:{gpu + rank}"]),
                ],
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
            for rank in range(1, ranks)
        ]

    def watch(self, lose: Callable[[str], None]) -> None:
        """`lose` is told of the first that ends."""
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._wait, args=(rank, process, lose), daemon=True).start()

    @staticmethod
    def _wait(rank: int, process: "subprocess.Popen[bytes]", lose: Callable[[str], None]) -> None:
        lose(f"the process of rank {rank} ended with code {process.wait()}")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self, grace_s: float) -> None:
        """Waits for those that have lost their leader; then kills."""
        for process in self._processes:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
