"""A chunk: one step's tokens and ends for all requests of one gateway, and the digest that judges them."""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from chassis.ids import Attempt, BootId, RequestId
from chassis.messages import check, check_id, parse
from chassis.messages.request import (
    Reason,
    Timings,
    Usage,
    build_timings,
    build_usage,
    parse_reason,
    parse_timings,
    parse_usage,
)
from chassis.messages.sampling import (
    PromptTold,
    TokenLogprobs,
    build_logprobs,
    build_prompt_told,
    parse_logprobs,
    parse_prompt_told,
)
from chassis.wire import request_pb2 as pb


class Part(NamedTuple):
    """A tuple: one is made per stream and step."""

    request_id: RequestId
    attempt: Attempt
    first_index: int
    ids: tuple[int, ...]
    digest: int  # of all output ids up to and with these
    logprobs: tuple[TokenLogprobs, ...] = ()  # one an id, if the request asks for them
    prompt: PromptTold | None = None  # the same of its prompt, with the first id


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: RequestId
    attempt: Attempt
    length: int
    digest: int
    reason: Reason
    byte_cut: int | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: str = ""
    retry_ms: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    boot: BootId
    number: int
    parts: tuple[Part, ...]
    finishes: tuple[Finish, ...]


EMPTY_DIGEST = 0
_DIGESTED = struct.Struct("<QI").pack  # digest so far, id


def extend_digest(digest: int, ids: Iterable[int]) -> int:
    """Running 64-bit digest of output ids: BLAKE2b-64 over (digest so far, id), one id at a time."""
    state = digest
    for token_id in ids:
        data = _DIGESTED(state, token_id)
        state = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return state


def build_chunk(chunk: Chunk) -> bytes:
    return pb.Chunk(
        boot=chunk.boot,
        number=chunk.number,
        parts=_parts(chunk.parts) if chunk.parts else None,
        finishes=[
            pb.Finish(
                request_id=f.request_id,
                attempt=f.attempt,
                length=f.length,
                digest=f.digest,
                reason=f.reason.value,
                byte_cut=f.byte_cut,
                usage=build_usage(f.usage),
                timings=build_timings(f.timings),
                error=f.error,
                retry_ms=f.retry_ms,
            )
            for f in chunk.finishes
        ],
    ).SerializeToString()


def _parts(parts: Sequence[Part]) -> pb.Parts:
    request_ids, attempts, first_indices, ids, digests, logprobs, prompts = zip(*parts, strict=True)
    return pb.Parts(
        request_ids=request_ids,
        attempts=attempts,
        first_indices=first_indices,
        lens=list(map(len, ids)),
        ids=list(chain.from_iterable(ids)),
        digests=digests,
        told=[i for i, entries in enumerate(logprobs) if entries] if any(logprobs) else None,
        logprobs=build_logprobs(list(chain.from_iterable(logprobs))),
        begun=[i for i, prompt in enumerate(prompts) if prompt] if any(prompts) else None,
        prompts=list(map(build_prompt_told, filter(None, prompts))) if any(prompts) else None,
    )


def _parse_parts(m: pb.Parts) -> Iterator[Part]:
    ids, lens = tuple(m.ids), m.lens
    n = len(lens)
    whole = n == len(m.request_ids) == len(m.attempts) == len(m.first_indices) == len(m.digests)
    check(whole and sum(lens) == len(ids), "parts: columns do not add up")
    told = _parse_told(m) if m.told else {}
    begun = _parse_begun(m) if m.begun else {}
    end = 0
    columns = zip(m.request_ids, m.attempts, m.first_indices, lens, m.digests, strict=True)
    for i, (request_id, attempt, first_index, length, digest) in enumerate(columns):
        begin, end = end, end + length
        logprobs = told.get(i, ()) if told else ()
        prompt = begun.get(i) if begun else None
        part_ids = ids[begin:end]
        yield Part(RequestId(request_id), Attempt(attempt), first_index, part_ids, digest, logprobs, prompt)


def _parse_told(m: pb.Parts) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By part."""
    entries, told = parse_logprobs(m.logprobs), tuple(m.told)
    check(max(told) < len(m.lens) and len(dict.fromkeys(told)) == len(told), "parts: told of no part")
    check(sum(m.lens[i] for i in told) == len(entries), "parts: logprobs do not add up")
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    end = 0
    for i in told:
        begin, end = end, end + m.lens[i]
        found[i] = entries[begin:end]
    return found


def _parse_begun(m: pb.Parts) -> dict[int, PromptTold]:
    """By part."""
    begun = tuple(m.begun)
    fine = len(begun) == len(m.prompts) == len(dict.fromkeys(begun)) and max(begun) < len(m.lens)
    check(fine and not any(m.first_indices[i] for i in begun), "parts: told of no prompt")
    return dict(zip(begun, map(parse_prompt_told, m.prompts), strict=True))


def parse_chunk(data: bytes) -> Chunk:
    m = parse(pb.Chunk, data)
    check_id(m.boot, "chunk: boot")
    check(m.number > 0, "chunk: number")
    return Chunk(
        boot=BootId(m.boot),
        number=m.number,
        parts=tuple(_parse_parts(m.parts)),
        finishes=tuple(
            Finish(
                RequestId(f.request_id),
                Attempt(f.attempt),
                f.length,
                f.digest,
                parse_reason(f.reason),
                f.byte_cut if f.HasField("byte_cut") else None,
                parse_usage(f.usage),
                parse_timings(f.timings),
                f.error,
                f.retry_ms,
            )
            for f in m.finishes
        ),
    )
