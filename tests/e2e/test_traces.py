"""What is stored of a request explains it: one connected tree, steps linked both ways, every millisecond."""

import asyncio
import secrets
import sys
from asyncio.subprocess import PIPE
from collections import Counter

import grpc
import grpc.aio

from chassis.trace import Span, step_key
from chassis.wire import gateway_pb2_grpc
from shoal.client import Params, build_generate
from shoal.ledger import steps_of
from shoal.why import Story, collect
from tests.e2e.collector import Collector
from tests.e2e.rig import ROOT, Answer, Running, ask, call, until

STAGES = 2
OF_A_REQUEST = {
    "gateway.generate",
    "gateway.publish",
    "gateway.stream",
    "batcher.request",
    "batcher.queue",
    "batcher.wait",
    "batcher.claim",
    "batcher.prefill",
    "batcher.decode",
    "batcher.finish",
}
OF_A_MATCH = {"batcher.kv_match", "kvstore.match"}  # of a prompt that begins as an earlier one did


def is_whole(story: Story, matched: bool) -> bool:
    """Everything that was recorded has arrived."""
    names = {span.name for span in story.spans}
    wanted = {step_key(*step) for span in story.spans for step in steps_of(span)}
    rings = Counter(s.key for s in story.steps if s.name == "batcher.step")
    stages = Counter(s.key for s in story.steps if s.name == "shard_worker.step")
    due = OF_A_REQUEST | OF_A_MATCH if matched else OF_A_REQUEST
    return names >= due and all(rings[key] == 1 and stages[key] == STAGES for key in wanted)


async def stories_of(shoal: Running, request_ids: list[str], matched: bool = True) -> list[Story]:
    bus = await shoal.bus()
    stories: list[Story] = []
    for request_id in request_ids:
        story = await collect(bus, request_id)

        async def whole(request_id: str = request_id) -> bool:
            nonlocal story
            story = await collect(bus, request_id)
            return is_whole(story, matched)

        await until(whole, f"the story of {request_id} is whole")
        stories.append(story)
    await bus.close()
    return stories


def check_tree(story: Story) -> None:
    """One root, one trace, everybody's parent there and around in time."""
    assert not story.orphans()
    roots = [s for s in story.spans if s.parent is None]
    assert [s.name for s in roots] == ["gateway.generate"]
    assert {s.context.trace_id for s in story.spans} == {roots[0].context.trace_id}
    assert len({s.context.span_id for s in story.spans}) == len(story.spans)
    by_id = {s.context.span_id: s for s in story.spans}
    parents = {s.name: by_id[s.parent].name for s in story.spans if s.parent is not None}
    assert parents["batcher.request"] == "gateway.generate"
    assert parents["kvstore.match"] == "batcher.request"
    for span in story.spans:
        assert span.start_ns <= span.end_ns and span.error is None, span


def check_links(story: Story) -> None:
    """A segment names its steps, a step its requests."""
    (summary,) = (s for s in story.spans if s.name == "batcher.request")
    rings = {s.key: s for s in story.steps if s.name == "batcher.step"}
    segments = [s for s in story.spans if s.name in ("batcher.prefill", "batcher.decode")]
    assert segments
    for segment in segments:
        contexts = [rings[step_key(*step)].context for step in steps_of(segment)]
        assert list(segment.links) == contexts
    for ring in rings.values():
        assert summary.context in ring.links
        assert story.request_id in str(ring.attributes["shoal.requests"]).split(",")
    for stage in (s for s in story.steps if s.name == "shard_worker.step"):
        ring = rings[stage.key]
        assert (stage.context.trace_id, stage.parent) == (ring.context.trace_id, ring.context.span_id)


def check_ledger(story: Story) -> None:
    book = story.ledger()
    assert book is not None
    assert abs(book.unaccounted_us) <= book.total_us / 100, book
    assert book.first_us is not None and book.first_unaccounted_us is not None
    assert abs(book.first_unaccounted_us) <= max(book.first_us / 100, 1), book
    names = [row.name for row in book.rows]
    assert {"publish", "queue", "prefill", "decode", "record", "compute"} <= set(names)


def test_a_request_is_one_connected_tree(calm: Running) -> None:
    async def life() -> list[Story]:
        async with calm.client() as client:
            calls = [call([50 + i] * (20 + 40 * i), 20 + 10 * i) for i in range(4)]
            await asyncio.gather(*(ask(client, Answer(c)) for c in calls))  # now each may be cached
            answers = await asyncio.gather(*(ask(client, Answer(c)) for c in calls))
        return await stories_of(calm, [a.request_id for a in answers])

    for story in calm.run(life()):
        check_tree(story)
        check_links(story)
        check_ledger(story)


def test_a_cached_prefix_shows(calm: Running) -> None:
    async def life() -> list[Story]:
        async with calm.client() as client:
            prompt = [60, *range(100)]
            first = await ask(client, Answer(call(prompt, 2)))
            again = await ask(client, Answer(call(prompt, 2)))
        unasked = await stories_of(calm, [first.request_id], matched=False)
        return unasked + await stories_of(calm, [again.request_id])

    for story, hit in zip(calm.run(life()), (0, 6), strict=True):
        matches = [s.attributes["shoal.blocks_hit"] for s in story.spans if s.name == "kvstore.match"]
        assert matches == ([hit] if hit else []), "nothing is asked about a prompt that is new"
        (prefill,) = (s for s in story.spans if s.name == "batcher.prefill")
        computed = {
            s.attributes["shoal.tokens"] for s in story.steps if s.key == step_key(*steps_of(prefill)[0])
        }
        assert computed == {101 - 16 * hit}
        check_ledger(story)


def test_a_caller_s_trace_goes_on(calm: Running, collector: Collector) -> None:
    """From the caller's span through every service, to the bus and to the OTLP endpoint alike."""
    trace_id, span_id = secrets.token_bytes(16), secrets.token_bytes(8)

    async def life() -> Story:
        async with grpc.aio.insecure_channel(calm.deployment.address) as channel:
            stub = gateway_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            metadata = (("traceparent", f"00-{trace_id.hex()}-{span_id.hex()}-01"),)
            asked = build_generate([70] * 20, Params(max_tokens=20, ignore_eos=True))
            async for _ in stub.Generate(asked):
                pass  # what it leaves in the cache is asked for now
            request_id = ""
            async for event in stub.Generate(asked, metadata=metadata):
                request_id = request_id or event.accepted.request_id
        (story,) = await stories_of(calm, [request_id])
        ids = {s.context.span_id for s in story.spans}
        await until(lambda: collector.of_trace(trace_id).keys() >= ids, "the spans reach the collector")
        steps = {s.context.span_id for s in story.steps}
        await until(lambda: steps <= {s.span_id for _, s in list(collector.spans)}, "its steps follow")
        return story

    story = calm.run(life())
    assert not story.orphans()
    assert {s.context.trace_id for s in story.spans} == {trace_id}
    (root,) = (s for s in story.spans if s.name == "gateway.generate")
    assert root.parent == span_id
    exported = collector.of_trace(trace_id)
    assert len(exported) == len(story.spans)
    for span in story.spans:
        check_export(span, *exported[span.context.span_id])


def check_export(span: Span, home: str, exported: object) -> None:
    assert home == span.name.partition(".")[0]
    for name, value in (
        ("name", span.name),
        ("parent_span_id", span.parent or b""),
        ("start_time_unix_nano", span.start_ns),
        ("end_time_unix_nano", span.end_ns),
    ):
        assert getattr(exported, name) == value
    links = [(link.trace_id, link.span_id) for link in exported.links]  # type: ignore[attr-defined]
    assert links == [(link.trace_id, link.span_id) for link in span.links]


def test_why_tells_it(calm: Running) -> None:
    async def life() -> tuple[int | None, str, str]:
        async with calm.client() as client:
            await ask(client, Answer(call([80] * 20, 10)))
            answer = await ask(client, Answer(call([80] * 20, 10)))
        await stories_of(calm, [answer.request_id])
        run_dir = str(calm.deployment.run_dir)
        command = (sys.executable, "-m", "shoal", "why", answer.request_id, "--run-dir", run_dir)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE)
        told, _ = await process.communicate()
        return process.returncode, told.decode(), answer.request_id

    code, told, request_id = calm.run(life())
    assert code == 0
    assert f"request {request_id}: length, 20 prompt tokens (16 cached), 10 made" in told
    for word in ("queue", "prefill", "compute", "gateway.generate", "kvstore.match", "attempt 1 claimed"):
        assert word in told, told
    assert "its parent is missing" not in told
