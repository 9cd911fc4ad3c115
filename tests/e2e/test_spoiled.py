"""Messages of the right kind with anything in them, some of their bytes others, on all subjects that services
listen to and every stream they read: nothing dies, and a stream beside them goes on."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from chassis import subjects
from chassis.bus import Bus
from chassis.errors import BusError
from chassis.wire import gateway_pb2, jobs_pb2, kvstore_pb2, pipeline_pb2, quota_pb2, request_pb2, trace_pb2
from tests.e2e.rig import Running, registered
from tests.e2e.test_bad_input import beside_a_stream
from tests.fuzz.garbage import spoiled

ALL = list(HealthCheck)
FEW = 20
MANY = 2_000


def drawn(kind: type[Message], count: int, seed: int) -> list[bytes]:
    found: list[bytes] = []

    @seeded(seed)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(spoiled(kind))
    def draw(data: bytes) -> None:
        found.append(data)

    draw()
    return found


async def targets(bus: Bus) -> list[tuple[str, type[Message]]]:
    """Core subjects with what they carry."""
    found: list[tuple[str, type[Message]]] = [
        (subjects.TAKEOVER, request_pb2.TakeoverQuestion),
        (subjects.batchers("fake"), request_pb2.ToBatcher),
        (subjects.loads("fake"), pipeline_pb2.PipelineLoad),
        (subjects.KEEP, trace_pb2.Keep),
    ]
    for prefix, subject, kind in (
        (subjects.GATEWAYS, "shoal.tok", request_pb2.Chunk),
        (subjects.BATCHERS, "shoal.own", request_pb2.ToBatcher),
        (subjects.BATCHERS, "shoal.stat", request_pb2.ToBatcher),
        (subjects.KVSTORES, "shoal.kvask", kvstore_pb2.HoldingsRequest),
    ):
        boots = [key.removeprefix(prefix) for key in await registered(bus, prefix)]
        assert boots
        found += [(f"{subject}.{boot}", kind) for boot in boots]
    return found


STORED: Sequence[tuple[str, type[Message]]] = (
    ("shoal.req.fake.5.SPOILED{}", request_pb2.Request),
    ("shoal.res.SPOILED{}", request_pb2.Record),
    ("shoal.quota.spoiled{}", quota_pb2.QuotaLedger),
    ("shoal.trace.SPOILED{}", trace_pb2.Segment),
    ("shoal.dead.job.t.q.spoiled{}", jobs_pb2.Letter),
    ("shoal.job.t.q.spoiled{}", gateway_pb2.GenerateRequest),
    ("$KV.shoal-registry.batcher.spoiled{}", pipeline_pb2.BatcherEntry),
    ("$KV.shoal-registry.worker.spoiled{}", pipeline_pb2.WorkerEntry),
    ("$KV.shoal-registry.kvstore.spoiled{}", pipeline_pb2.KvstoreEntry),
    ("$KV.shoal-registry.gateway.spoiled{}", pipeline_pb2.GatewayEntry),
)


async def pelt(calm: Running, count: int) -> None:
    bus = await calm.bus()
    heard = [(subject, drawn(kind, count, i)) for i, (subject, kind) in enumerate(await targets(bus))]
    stored = [(form, drawn(kind, count, 1000 + i)) for i, (form, kind) in enumerate(STORED)]
    async with beside_a_stream(calm):
        for subject, messages in heard:
            for data in messages:
                bus.publish(subject, data)
                with suppress(BusError):
                    await bus.request(subject, data, 0.001)
        for form, messages in stored:
            headers = {"Content-Type": "application/x-protobuf"} if ".job." in form else None
            for i, data in enumerate(messages):
                with suppress(BusError):
                    await bus.append(form.format(i), data, headers=headers)
        for kind in ("batcher", "worker", "kvstore", "gateway"):
            for i in range(count):
                await bus.delete_entry(f"{kind}.spoiled{i}")
    await bus.close()


def test_spoiled_messages_kill_nothing(calm: Running) -> None:
    calm.run(pelt(calm, FEW))


@pytest.mark.slow
def test_for_long(calm: Running) -> None:
    calm.run(pelt(calm, MANY), limit_s=1200)
