"""How other processes of this user speak with a running launcher: a unix socket in its run folder.

One line of JSON in, one out, then the connection ends. `{"scale": {"pipelines": 2}}` is answered with what
changed and what runs, `{"scale": {}}` with what runs; whatever is wrong, with `{"error": "..."}`.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.plan import LaunchError
from shoal.scaling import Scaling

SOCKET_FILE = "control.sock"
LINE_BYTES_MAX = 1 << 16
ASK_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 16
_PATH_BYTES_MAX = 100  # what every system's socket addresses hold


class Control:
    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def listening(self, run_dir: Path) -> AsyncIterator[None]:
        """Whoever may write in the folder may ask. What is under way at the end is given up."""
        path = run_dir / SOCKET_FILE
        path.unlink(missing_ok=True)
        with _address(path) as address:
            server = await asyncio.start_unix_server(self._serve, address, limit=LINE_BYTES_MAX)
            path.chmod(0o600)
            try:
                yield
            finally:
                server.close()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > CONNECTIONS_MAX:
                answer: dict[str, object] = {"error": f"{CONNECTIONS_MAX} ask already"}
            else:
                try:
                    answer = await self._answer(reader)
                except asyncio.CancelledError:  # ours, at the end: `listening`
                    answer = {"error": "the deployment is being stopped"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass  # who asked has gone; what was asked is done
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> dict[str, object]:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                asked = json.loads(await reader.readline())
        except (ValueError, TimeoutError, RecursionError):
            return {"error": "not a line of JSON"}
        wanted = asked.get("scale") if isinstance(asked, dict) and len(asked) == 1 else None
        if not isinstance(wanted, dict):
            return {"error": 'not {"scale": {...}}'}
        try:
            return asdict(await self._scaling.scale(wanted))
        except LaunchError as error:
            return {"error": str(error)}


async def ask(run_dir: Path, question: dict[str, object], timeout_s: float) -> dict[str, Any]:
    """What the launcher of this folder answers. Raises LaunchError."""
    path = run_dir / SOCKET_FILE
    try:
        async with asyncio.timeout(timeout_s):
            with _address(path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=LINE_BYTES_MAX)
            with contextlib.closing(writer):
                writer.write(json.dumps(question).encode() + b"\n")
                answer = json.loads(await reader.readline())
    except TimeoutError:
        raise LaunchError(f"the launcher in {run_dir} has not answered for {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"the launcher in {run_dir} does not answer: {error}") from None
    if not isinstance(answer, dict):
        raise LaunchError(f"the launcher in {run_dir} says {answer!r}")
    if "error" in answer:
        raise LaunchError(str(answer["error"]))
    return answer


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """The path, or where it is too long for a socket's address, one through the opened folder (Linux)."""
    whole = str(path)
    if len(os.fsencode(whole)) <= _PATH_BYTES_MAX:
        yield whole
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
