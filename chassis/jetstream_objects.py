"""Objects in chunks, in the layout of the NATS object store, so that its own tools can read them.

The description is written last: an object is there as a whole or not at all.
"""

import base64
import hashlib
from typing import Any

import orjson

from chassis import jetstream as js
from chassis.bus import Stored
from chassis.errors import BusError, BusUnavailable
from chassis.jetstream_client import JetStream, Wire
from chassis.subjects import CARDS, CARDS_BUCKET

CHUNK_LEN = 256 * 1024
OBJECT_LEN_MAX = 64 << 20


class Objects:
    def __init__(self, wire: Wire, jetstream: JetStream) -> None:
        self._wire = wire
        self._jetstream = jetstream

    async def put(self, name: str, data: bytes) -> None:
        """Does nothing when the same bytes are there under this name."""
        if len(data) > OBJECT_LEN_MAX:
            raise ValueError(f"an object holds at most {OBJECT_LEN_MAX} bytes, not {len(data)}")
        digest = _digest(data)
        known = await self._describe(name)
        if known is not None and known.get("digest") == digest and known.get("size") == len(data):
            return
        place = self._wire.new_inbox().rpartition(".")[2]  # a fresh name for the chunks
        chunks = range(0, len(data), CHUNK_LEN)
        try:
            for start in chunks:
                await self._jetstream.append(_chunks(place), data[start : start + CHUNK_LEN])
            description = {
                "name": name,
                "bucket": CARDS_BUCKET,
                "nuid": place,
                "size": len(data),
                "chunks": len(chunks),
                "digest": digest,
                "options": {"max_chunk_size": CHUNK_LEN},
            }
            await self._jetstream.append(_meta(name), orjson.dumps(description), headers={js.ROLLUP: "sub"})
        except BusError:
            self._purge(place)
            raise
        if known is not None:
            self._purge(known["nuid"])

    async def get(self, name: str) -> bytes | None:
        """Raises BusUnavailable when the object is being replaced or is damaged."""
        description = await self._describe(name)
        if description is None:
            return None
        subject = _chunks(description["nuid"])
        parts: list[bytes] = []
        seq = 1
        for _ in range(description["chunks"]):
            chunk: Stored | None = await self._jetstream.get(CARDS, {"seq": seq, "next_by_subj": subject})
            if chunk is None:
                break
            parts.append(chunk.data)
            seq = chunk.seq + 1
        data = b"".join(parts)
        if _digest(data) != description["digest"]:
            raise BusUnavailable(f"object {name}: what is stored is not what its digest says")
        return data

    async def _describe(self, name: str) -> dict[str, Any] | None:
        stored = await self._jetstream.last(CARDS, _meta(name))
        if stored is None:
            return None
        description: dict[str, Any] = orjson.loads(stored.data)
        return None if description.get("deleted") else description

    def _purge(self, place: str) -> None:
        self._wire.send(f"{js.API}.STREAM.PURGE.{CARDS}", js.encode({"filter": _chunks(place)}))


def _chunks(place: str) -> str:
    return f"$O.{CARDS_BUCKET}.C.{place}"


def _meta(name: str) -> str:
    return f"$O.{CARDS_BUCKET}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _digest(data: bytes) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
