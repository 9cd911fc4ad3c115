"""Nonsense at every door: it gets a clear answer where somebody can be told, and disturbs nobody.

Each test runs beside a stream that must go on as if nothing were; afterwards the same processes must still
run, in the same epoch, and answer a normal request.
"""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import nats
import pytest

from chassis import subjects
from chassis.bus import Bus
from chassis.ids import RequestId
from chassis.messages.card import card_digest
from chassis.messages.forming import FORM
from chassis.messages.gateway import GenerateCall
from chassis.messages.kvstore import ATTACH, EXCHANGE, MATCH, STATS
from chassis.messages.registry import ModelEntry, build_model, parse_batcher, parse_kvstore, parse_worker
from chassis.messages.request import Reason, Terminal
from chassis.wire import request_pb2 as wire
from shoal.client import AsyncClient, Params, Prompt, ShoalError
from shoal.why import collect
from tests.e2e.rig import (
    Answer,
    Running,
    ask,
    call,
    is_pending,
    last_record,
    registered,
    resume,
    settled,
    until,
)
from tests.sim.clients import expected

SILENCE_MAX_S = 2.0  # of the stream beside it; a lost pipeline would take longer
GENERATE = "/shoal.v1.Inference/Generate"
INVALID, NOT_FOUND = "INVALID_ARGUMENT", "NOT_FOUND"

random_bytes = random.Random(3).randbytes
GARBAGE = (
    b"",
    b"\0",
    b"\xff" * 64,
    b"\x0a\xff\xff\xff\xff\x0f",  # a field of four gigabytes
    b"\x0a\x02\xff\xfe",  # a string that is no UTF-8
    b"{}",
    random_bytes(17),
    random_bytes(1000),
    random_bytes(100_000),
)
ODD_IDS = ("", "a b", "*", ">", "a.b", "a\r\nPUB x 1\r\n", "x" * 300)


@asynccontextmanager
async def beside_a_stream(shoal: Running) -> AsyncIterator[AsyncClient]:
    bus = await shoal.bus()
    pids, epochs = shoal.deployment.pids(), await standing_epochs(bus)
    async with shoal.client() as client:
        stream = Answer(call(range(40), 4000))
        asking = asyncio.create_task(ask(client, stream))
        try:
            await until(lambda: len(stream.ids) > 2, "the stream beside it begins")
            yield client
            heard = len(stream.ids)
            await until(lambda: len(stream.ids) > heard + 2, "the stream beside it goes on")
            assert stream.longest_silence_s < SILENCE_MAX_S
        finally:
            await client.cancel(stream.request_id)
            await asking
        made = expected(replace(stream.call, max_tokens=len(stream.ids)))[0]
        assert stream.ids == made
        (await ask(client, Answer(call([1, 2, 3], 5)))).check()
    assert shoal.deployment.pids() == pids
    assert await standing_epochs(bus) == epochs
    await bus.close()


async def standing_epochs(bus: Bus) -> set[int]:
    entries = [parse_batcher(e.value) for e in await bus.entries(subjects.BATCHERS) if e.value is not None]
    return {entry.epoch for entry in entries if entry.standing}


# ---- at the gateway --------------------------------------------------------------------------------

REFUSED: Sequence[tuple[str, Prompt, Params, str, tuple[str, ...]]] = (
    ("empty prompt", "", Params(), INVALID, ("prompt", "1 to 524288")),
    ("no tokens", [], Params(), INVALID, ("token_ids", "at least 1")),
    ("no role", [("", "hello")], Params(), INVALID, ("chat.turns[0].role", "1 to 64")),
    ("unknown model", "hello", Params(model="gpt"), NOT_FOUND, ("model", "gpt")),
    ("long prompt", [1] * 4097, Params(), INVALID, ("token_ids", "4095")),
    ("full context", [1] * 4096, Params(), INVALID, ("token_ids", "4095")),
    ("no such token", [512], Params(), INVALID, ("token_ids", "512")),
    ("cold", "hello", Params(temperature=-1.0), INVALID, ("temperature", "0 to 2")),
    ("no temperature", "hello", Params(temperature=float("nan")), INVALID, ("temperature", "0 to 2")),
    ("no nucleus", "hello", Params(top_p=0.0), INVALID, ("top_p", "above 0, up to 1")),
    ("no output", "hello", Params(max_tokens=0), INVALID, ("max_tokens", "at least 1")),
    ("low priority", "hello", Params(priority=10), INVALID, ("priority", "9")),
    ("long stop", "hello", Params(stop=("x" * 257,)), INVALID, ("stop[0]", "256")),
    ("many stops", "hello", Params(stop=("x",) * 17), INVALID, ("stop", "16")),
    ("2 MB", "x" * (2 << 20), Params(), INVALID, ("prompt", "2097152", "524288")),
    ("5 MB", "x" * (5 << 20), Params(), "RESOURCE_EXHAUSTED", ("4194304",)),
)


def test_refusals_name_field_and_limit(calm: Running) -> None:
    async def life() -> None:
        async with beside_a_stream(calm) as client:
            for name, prompt, params, code, words in REFUSED:
                with pytest.raises(ShoalError) as refused:
                    async for _ in client.generate(prompt, params):
                        raise AssertionError(f"{name}: taken")
                assert refused.value.code == code, name
                assert all(word in refused.value.message for word in words), refused.value.message

    calm.run(life())


def test_garbage_to_the_methods_is_told_apart(calm: Running) -> None:
    no_utf8 = {b"\x1a\x02\xff\xfe": "prompt:", b"\x1a\x01x\x5a\x01\xff": "stop[0]:"}

    async def life() -> None:
        async with (
            beside_a_stream(calm),
            grpc.aio.insecure_channel(calm.deployment.address) as channel,
        ):
            for garbage in (*no_utf8, *GARBAGE[1:]):
                stream = channel.unary_stream(GENERATE)(garbage, timeout=10)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in stream:
                        raise AssertionError(f"taken: {garbage[:40]!r}")
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, garbage[:40]
                assert "GenerateRequest" in refused.value.details()
                if garbage in no_utf8:
                    assert f"{no_utf8[garbage]} not UTF-8 at byte 0" in refused.value.details()
            for method in ("Cancel", "Tokenize", "Resume", "ListModels", "Nonsense"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(f"/shoal.v1.Inference/{method}")(b"\xff", timeout=10)
                wanted = "UNIMPLEMENTED" if method == "Nonsense" else INVALID
                assert refused.value.code().name == wanted, method

    calm.run(life())


# ---- on the bus ------------------------------------------------------------------------------------


async def boots(bus: Bus, prefix: str) -> list[str]:
    return sorted(key.removeprefix(prefix) for key in await registered(bus, prefix))


def test_garbage_on_core_subjects_is_ignored(calm: Running) -> None:
    async def life() -> None:
        bus = await calm.bus()
        targets = [subjects.batchers("fake"), subjects.TAKEOVER, subjects.KEEP]
        targets += [f"shoal.tok.{boot}" for boot in await boots(bus, subjects.GATEWAYS)]
        targets += [f"shoal.own.{boot}" for boot in await boots(bus, subjects.BATCHERS)]
        assert len(targets) >= 6
        async with beside_a_stream(calm):
            client = await nats.connect(calm.deployment.nats_url)
            for target in targets:
                for garbage in GARBAGE:
                    await client.publish(target, garbage)
                    await client.publish(target, garbage, reply="somewhere.else")
            await client.flush()
            await client.close()
        await bus.close()

    calm.run(life())


def test_ids_that_break_subjects_break_nothing(calm: Running) -> None:
    """Well-formed messages whose sender could not be answered, some about the stream that goes on."""

    async def life() -> None:
        bus = await calm.bus()
        (batcher,) = await boots(bus, subjects.BATCHERS)
        gateways = await boots(bus, subjects.GATEWAYS)
        async with beside_a_stream(calm) as client:
            victim = Answer(call(range(9), 60))
            asking = asyncio.create_task(ask(client, victim))
            await until(lambda: bool(victim.ids), "another stream begins")
            named: dict[str, Any] = {"request_id": victim.request_id, "attempt": 9}
            for i, odd in enumerate(ODD_IDS):
                asked = wire.Request(id=f"ODD{i}", gateway=odd, model="fake", prompt_ids=[1])
                asked.limits.max_tokens, asked.sampling.top_p = 3, 1
                await bus.append(f"shoal.req.fake.5.ODD{i}", asked.SerializeToString())
                old = wire.Parts(
                    request_ids=[victim.request_id],
                    attempts=[0],
                    first_indices=[0],
                    lens=[1],
                    ids=[1],
                    digests=[2],
                )
                for gateway in gateways:
                    chunk = wire.Chunk(boot=odd, number=1, parts=old)
                    bus.publish(f"shoal.tok.{gateway}", chunk.SerializeToString())
                bus.publish(subjects.TAKEOVER, wire.TakeoverQuestion(boot=odd, **named).SerializeToString())
                for said in (
                    wire.ToBatcher(owner=wire.OwnerQuestion(ack_token=odd, **named)),
                    wire.ToBatcher(attach=wire.Attach(gateway=odd, **named)),
                    wire.ToBatcher(refused=wire.Refused(gateway=odd, old_minimum=99, **named)),
                ):
                    bus.publish(f"shoal.own.{batcher}", said.SerializeToString())
            await asking
            victim.check()
            for i in range(len(ODD_IDS)):
                await settled(bus, f"ODD{i}")
                record = await last_record(bus, f"ODD{i}")
                assert isinstance(record, Terminal) and "gateway" in record.error
        await bus.close()

    calm.run(life())


def test_garbage_requests_get_a_failed_record(calm: Running) -> None:
    """Whoever published it finds out; the message does not come back for ever."""

    async def life() -> None:
        bus = await calm.bus()
        async with beside_a_stream(calm):
            ids = [f"GARBAGE{i}" for i in range(len(GARBAGE))]
            for name, garbage in zip(ids, GARBAGE, strict=True):
                await bus.append(f"shoal.req.fake.5.{name}", garbage)
            for odd in (
                "shoal.req.fake.5",
                "shoal.req.fake.x.ID",
                "shoal.req.fake.5.I%D",
                "shoal.req.a.b.c.d",
            ):
                await bus.append(odd, b"\xff")
            for name in ids:

                async def refused(name: str = name) -> bool:
                    return not await is_pending(bus, name)

                await until(refused, f"{name} is refused")
                record = await last_record(bus, name)
                assert isinstance(record, Terminal) and record.reason is Reason.FAILED and record.error
        await bus.close()

    calm.run(life())


def test_garbage_in_ownership_logs_changes_no_answer(calm: Running) -> None:
    """Of a request that runs, of one that ended, and of one that does not exist."""

    async def life() -> None:
        bus = await calm.bus()
        async with beside_a_stream(calm) as client, calm.client(1) as other:
            ended = await ask(client, Answer(call(range(3), 10)))
            running = Answer(call(range(5), 60))
            asking = asyncio.create_task(ask(client, running))
            await until(lambda: bool(running.ids), "another stream begins")
            for garbage in GARBAGE:
                for name in (ended.request_id, running.request_id, "NOBODYS"):
                    await bus.append(f"shoal.res.{name}", garbage)
            await asking
            for answer in (running, ended):
                answer.check()
                again = Answer(answer.call, request_id=answer.request_id)
                await resume(other, again)
                again.check()
            await settled(bus, running.request_id)
        await bus.close()

    calm.run(life())


def test_garbage_among_traces_and_dead_letters_is_passed_over(calm: Running) -> None:
    async def life() -> None:
        bus = await calm.bus()
        async with beside_a_stream(calm) as client:
            answer = await ask(client, Answer(call(range(4), 10)))
            named = RequestId(answer.request_id)
            for garbage in GARBAGE:
                await bus.append(subjects.trace(named), garbage)
                await bus.append(subjects.dead(named), garbage)

            async def told() -> bool:
                return (await collect(bus, named)).ledger() is not None

            await until(told, "its ledger is whole")
        await bus.close()

    calm.run(life())


def test_garbage_in_the_registry_and_among_cards_is_ignored(calm: Running) -> None:
    async def life() -> None:
        bus = await calm.bus()
        prefixes = (
            subjects.WORKERS,
            subjects.BATCHERS,
            subjects.KVSTORES,
            subjects.GATEWAYS,
            subjects.MODELS,
            "epoch.",
            "",
        )
        keys = [f"{prefix}GARBAGE{i}" for prefix in prefixes for i in range(len(GARBAGE))]
        async with beside_a_stream(calm) as client:
            for i, key in enumerate(keys):
                await bus.put_entry(key, GARBAGE[i % len(GARBAGE)])
            card = random_bytes(5000)
            digest = card_digest(card)
            await bus.put_object(subjects.card_object(digest), card)
            await bus.put_entry(
                subjects.model_key("broken"), build_model(ModelEntry("broken", digest, digest))
            )
            assert [m.name for m in await client.models()] == ["fake"]
            for key in (*keys, subjects.model_key("broken")):
                await bus.delete_entry(key)
        await bus.close()

    calm.run(life())


# ---- on the sockets --------------------------------------------------------------------------------


def listening_ports(pid: int) -> list[int]:
    """TCP ports of loopback that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = link.readlink().name
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(set(ports))


async def send_garbage(port: int, garbage: bytes, hang: bool) -> None:
    """Whether or not the other side takes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if hang:  # its close is a reset
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    try:
        writer.write(garbage)
        if not hang:
            writer.write_eof()
        async with asyncio.timeout(0.2):
            while await reader.read(1 << 16):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


def test_garbage_on_every_port_is_ignored(calm: Running) -> None:
    lines = (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random_bytes(200),
        b"\x16\x03\x01\x02\x00" + random_bytes(100),  # of TLS
        b"\xff\xff\xff\xff" * 8,  # a huge length
        b"\0" * 64,
    )

    async def life() -> None:
        pids = {name: pid for name, pid in calm.deployment.pids().items() if name != "nats"}
        ports = {name: listening_ports(pid) for name, pid in pids.items()}
        wanted = {"gateway": 3, "worker": 3, "batcher": 2, "kvstore": 2}  # metrics are one of each
        assert all(len(found) == wanted[name.split("-")[0]] for name, found in ports.items()), ports
        async with beside_a_stream(calm):
            await asyncio.gather(
                *(
                    send_garbage(port, garbage, hang)
                    for found in ports.values()
                    for port in found
                    for garbage in (*GARBAGE, *lines)
                    for hang in (False, True)
                )
            )

    calm.run(life())


def test_garbage_to_the_services_own_methods_is_refused(calm: Running) -> None:
    """What only a neighbour would call, at kvstore and at both workers."""

    async def refusal(channel: grpc.aio.Channel, path: str, garbage: bytes) -> str:
        try:
            await channel.unary_unary(path)(garbage, timeout=5)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "taken"

    async def life() -> None:
        bus = await calm.bus()
        workers = [parse_worker(e.value) for e in await bus.entries(subjects.WORKERS) if e.value is not None]
        stores = [parse_kvstore(e.value) for e in await bus.entries(subjects.KVSTORES) if e.value is not None]
        assert (len(workers), len(stores)) == (2, 1)
        doors = [(w.rpc_address, FORM.path) for w in workers]
        doors += [(s.rpc_address, m.path) for s in stores for m in (ATTACH, MATCH, EXCHANGE, STATS)]
        async with beside_a_stream(calm):
            for address, path in doors:
                async with grpc.aio.insecure_channel(address) as channel:
                    for garbage in GARBAGE[1:]:
                        assert await refusal(channel, path, garbage) == INVALID, (path, garbage[:40])
        await bus.close()

    calm.run(life())


def test_a_call_is_what_it_was_before(calm: Running) -> None:
    """After all of that, a whole answer."""

    async def life() -> None:
        async with calm.client() as client:
            made = GenerateCall(
                token_ids=(5, 6, 7), max_tokens=30, temperature=1.0, seed=9, model="fake", ignore_eos=True
            )
            (await ask(client, Answer(made))).check()

    calm.run(life())
