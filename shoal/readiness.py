"""Whether what was started serves: asked of the registry, of gateways, and of each service's own probes."""

import asyncio
import re

from chassis import log, subjects
from chassis.bus import Bus, Entry
from chassis.errors import BusError
from chassis.messages import BadMessage
from chassis.messages.registry import parse_batcher, parse_worker
from shoal.client import AsyncClient, ShoalError

PROBE_TIMEOUT_S = 2.0
_BODY_BYTES_MAX = 4 << 20


async def standing(bus: Bus) -> set[str]:
    """The keys of the batchers that say that their pipeline stands. What is no entry of one says nothing."""
    try:
        entries = await bus.entries(subjects.BATCHERS)
    except BusError:
        return set()
    return {entry.key for entry in entries if entry.value is not None and _stands(entry.value)}


async def forget_models(bus: Bus) -> None:
    """Those that no worker has: what was served before is known until its entry expires, and who names no
    model would have to name one of several."""
    try:
        alive = {_model_key(entry) for entry in await bus.entries(subjects.WORKERS)}
        for entry in await bus.entries(subjects.MODELS):
            if entry.key not in alive:
                await bus.delete_entry(entry.key)
    except BusError as error:
        log.debug("models not forgotten", error=str(error))


def _model_key(worker: Entry) -> str | None:
    try:
        return None if worker.value is None else subjects.model_key(parse_worker(worker.value).model)
    except (BadMessage, ValueError):
        return None


def _stands(value: bytes) -> bool:
    try:
        return parse_batcher(value).standing
    except BadMessage:
        return False


async def serves(client: AsyncClient) -> bool:
    """With keys, to be told so is enough: whoever asks has none."""
    try:
        return await client.serving() and bool(await client.models())
    except ShoalError as error:
        return error.code == "UNAUTHENTICATED"


async def is_ready(address: str) -> bool:
    """What a service says of itself (`/ready` where its metrics are); False while nobody answers."""
    status, _ = await _get(address, "/ready")
    return status == 200


async def in_use(address: str) -> bool | None:
    """Whether a batcher has this worker; None while nobody answers."""
    value = await value_of(address, "shoal_stage_in_use")
    return None if value is None else value > 0


async def value_of(address: str, name: str) -> float | None:
    """The first of the metrics whose name, and labels if it says some, begin so (a regular expression)."""
    _, body = await _get(address, "/metrics")
    found = re.search(rf"^{name}[^ \n]* (\S+)$", body, re.MULTILINE)
    return None if found is None else float(found[1])


async def label_of(address: str, name: str, label: str) -> str | None:
    """What the first of the metrics with this name has as a label; None while nobody answers."""
    _, body = await _get(address, "/metrics")
    found = re.search(rf'^{name}\{{(?:[^\n]*,)?{label}="((?:[^"\\\n]|\\.)*)"', body, re.MULTILINE)
    return None if found is None else re.sub(r"\\(.)", r"\1", found[1])


async def _get(address: str, path: str) -> tuple[int, str]:
    """Status and body; status 0 when there is no answer."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                answer = bytearray()
                while (data := await reader.read(1 << 16)) and len(answer) < _BODY_BYTES_MAX:
                    answer += data
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0, ""
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0, body.decode(errors="replace")
