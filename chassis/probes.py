"""A small HTTP server in each service: `/metrics` for scrapers, `/live` and `/ready` for whoever restarts it.

Rules: GET and HEAD, one answer a connection, bounds on everything: what is slow, large or too many is let
go. It answers from the service's own loop, so that `/live` says that the loop turns.
"""

import asyncio
import errno
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from chassis import log
from chassis.config import ConfigError
from chassis.metrics import CONTENT_TYPE, Family, counter, gauge, render

HEAD_BYTES_MAX = 8192
TIMEOUT_S = 5.0
CONNECTIONS_MAX = 16
TEXT = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Not Ready"}


class Probes:
    """`ready`: whether work is taken in; `families`: what the service counts."""

    def __init__(self, ready: Callable[[], bool], families: Callable[[], Iterable[Family]]) -> None:
        self._ready = ready
        self._families = families
        self._connections = 0

    def answer(self, method: str, path: str) -> tuple[int, str, str]:
        """Status, content type, body."""
        if method not in ("GET", "HEAD"):
            return 405, TEXT, "GET or HEAD\n"
        match path.partition("?")[0]:
            case "/metrics":
                return 200, CONTENT_TYPE, render((*self._families(), *of_process()))
            case "/live":
                return 200, TEXT, "live\n"
            case "/ready":
                return (200, TEXT, "ready\n") if self._ready() else (503, TEXT, "not ready\n")
            case _:
                return 404, TEXT, "/metrics, /live or /ready\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._exchange(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asks so gets nothing
        finally:
            self._connections -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            status, kind, body = 400, TEXT, "not HTTP/1\n"
        else:
            status, kind, body = self.answer(words[0], words[1])
        data = body.encode()
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(data)}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (b"" if words[0] == "HEAD" else data))
        await writer.drain()


@asynccontextmanager
async def serve(address: str, probes: Probes) -> AsyncIterator[str]:
    """Listens on `host:port` (port 0: any free one) and gives the address. Raises ConfigError.

    Empty if somebody has the port: the service is worth more than what it tells."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"metrics_address: {address!r}; host:port")
    try:
        server = await asyncio.start_server(
            probes.serve, host.strip("[]") or None, int(port), limit=HEAD_BYTES_MAX
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"metrics_address: {address}: {error}") from None
        log.error("no metrics: the port is taken", metrics_address=address)
        yield ""
        return
    except OverflowError as error:
        raise ConfigError(f"metrics_address: {address}: {error}") from None
    try:
        bound = server.sockets[0].getsockname()
        listening = f"{host}:{bound[1]}"
        log.info("metrics", metrics_address=listening)
        yield listening
    finally:
        server.close()


def of_process() -> Iterator[Family]:
    """Under the names that Prometheus' own clients use."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    yield counter("process_cpu_seconds_total", "Processor time, user and system").add(cpu_s)
    resident = _resident_bytes()
    if resident is not None:
        yield gauge("process_resident_memory_bytes", "Resident memory").add(resident)


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
