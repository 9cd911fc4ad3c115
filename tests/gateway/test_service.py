"""The gateway over the in-memory bus: what clients see while batchers and other clients do theirs."""

import asyncio
import tracemalloc
from dataclasses import replace

import pytest

from chassis import subjects
from chassis.api_keys import ApiKey
from chassis.errors import Code, Status
from chassis.habits import Fate, Habits
from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages.chunk import Chunk, build_chunk
from chassis.messages.gateway import Accepted, Delta, GenerateCall, Turn
from chassis.messages.ownership import (
    AttachKind,
    CancelAsk,
    Detached,
    Refused,
    TakeoverAnswer,
    TakeoverQuestion,
    build_takeover_question,
)
from chassis.messages.request import Cancel, Claim, Reason, parse_record
from chassis.trace import TraceContext
from gateway.admission import request_id_of
from tests.gateway.rig import Reader, Rig, ScriptedBatcher, byte_card, call, run, until
from tests.sim.loop import run as run_virtual


async def records(rig: Rig, request_id: RequestId) -> list[object]:
    stored = await rig.bus("reader").read(subjects.RESULTS, subjects.result(request_id), 0, 100)
    return [parse_record(s.data) for s in stored]


def test_a_request_from_end_to_end() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call("h\u00e9", seed=9, max_tokens=8, stop=("!",))))
            job = await batcher.take()
            assert job.request.prompt_ids == tuple("h\u00e9".encode())
            assert (job.request.seed, job.request.limits.max_tokens) == (9, 8)
            assert job.request.limits.stop == (b"!",)
            await reader.accepted()
            for byte in "ol\u00e9!".encode():
                batcher.send(job, byte)
            await batcher.end(job, byte_cut=4)
            await reader.done()
            assert reader.events[0] == Accepted(job.request.id, 3, 9)
            assert reader.text == "ol\u00e9"
            assert reader.ids == list("ol\u00e9!".encode())
            assert reader.finished is not None and reader.finished.reason is Reason.STOP
            assert reader.finished.usage.output_tokens == 5
            assert not batcher.heard, "a quiet request needs no words"

    run(main())


def test_chat_is_rendered_by_the_models_template() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, _):
            chat = GenerateCall(chat=(Turn("user", "hi"),))
            ids = await gateway.tokenize(chat)
            end = list(ids).index(256)
            assert bytes(ids[:end]) == b"<|im_start|>user\nhi"
            assert bytes(ids[end + 1 :]) == b"\n<|im_start|>assistant\n"
            assert [m.name for m in gateway.list_models()] == ["bytes"] and gateway.list_models()[0].chat

    run(main())


def test_text_is_held_back_while_it_may_become_a_stop() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(stop=("STOP",))))
            job = await batcher.take()
            for byte in b"aST":
                batcher.send(job, byte)
            await until(lambda: len(reader.ids) == 3)
            assert reader.text == "a"
            batcher.send(job, ord("x"))
            await until(lambda: reader.text == "aSTx")
            await reader.leave()

    run(main())


def test_a_slow_reader_gets_one_delta_and_blocks_nobody() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            slow = gateway.generate(call("slow"))
            job = asyncio.create_task(batcher.take())
            accepted = await anext(slow)
            assert isinstance(accepted, Accepted)
            held = await job
            quick = Reader(gateway.generate(call("quick")))
            other = await batcher.take()
            for byte in b"abc":
                batcher.send(held, byte)
                batcher.send(other, byte)
            await until(lambda: quick.text == "abc")
            assert await anext(slow) == Delta("abc", tuple(b"abc"), 0)
            await slow.aclose()
            await quick.leave()

    run(main())


def test_priority_and_trace_go_with_the_request() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(priority=2)))
            job = await batcher.take(priority=2)
            assert job.request.priority == 2 and len(job.request.trace_parent) == 25
            await batcher.end(job, Reason.LENGTH)
            await reader.done()
            spans, _ = rig.tracer.take()
            by_name = {span.name: span for span in spans}
            root = by_name["gateway.generate"]
            assert job.request.trace_parent[:24] == root.context.trace_id + root.context.span_id
            for name in ("gateway.publish", "gateway.stream"):
                assert by_name[name].parent == root.context.span_id
                assert by_name[name].context.trace_id == root.context.trace_id
            assert root.attributes["gen_ai.response.finish_reasons"] == "length" and root.error is None
            assert not any("hi" in str(v) for s in spans for v in s.attributes.values()), "no prompt text"

    run(main())


def test_leaving_cancels_at_the_owner_and_in_the_log() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call()))
            job = await batcher.take()
            batcher.send(job, 1)
            await until(lambda: reader.ids)
            await reader.leave()
            await until(lambda: batcher.heard)
            assert batcher.heard == [CancelAsk(job.request.id, "disconnect")]
            await until(lambda: gateway._streams.idle)
            assert await records(rig, job.request.id) == [
                Claim(Attempt(1), batcher.boot, job.request.body_digest),
                Cancel(Attempt(1), batcher.boot, "disconnect"),
            ]

    run(main())


def test_leaving_with_a_window_detaches_and_resume_elsewhere_brings_the_rest() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher), rig.gateway("gw2") as second:
            await until(lambda: second.ready)
            reader = Reader(gateway.generate(call(resume_window_s=60, stop=("cd!",))))
            job = await batcher.take()
            for byte in b"abc":
                batcher.send(job, byte)
            await until(lambda: len(reader.ids) == 3)
            await reader.leave()
            await until(lambda: batcher.heard)
            assert batcher.heard == [Detached(job.request.id, GatewayId(gateway.boot))]
            batcher.answers[job.request.id] = AttachKind.ATTACHED
            rest = Reader(second.resume(reader.request_id, tuple(reader.ids), "t"))
            rest.first_index = 3
            await rest.accepted()
            await until(lambda: len(batcher.heard) == 2)
            job.ids = list(b"abc")
            batcher.send(job, *b"xyz", to=GatewayId(second.boot))
            job.request = replace(job.request, gateway=GatewayId(second.boot))
            await batcher.end(job)
            await rest.done()
            assert reader.text + rest.text == "abcxyz", "and the c that was held back comes once"
            assert rest.ids == list(b"xyz")

    run(main())


def test_resume_of_what_is_over_comes_from_the_record() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(stop=("d",))))
            job = await batcher.take()
            batcher.send(job, *b"abcd")
            await batcher.end(job, byte_cut=3)
            await reader.done()
            rest = Reader(gateway.resume(job.request.id, tuple(b"ab"), "t"))
            rest.first_index = 2
            await rest.done()
            assert (rest.text, rest.ids) == ("c", list(b"cd"))
            assert rest.events[0] == Accepted(job.request.id, 2, 0)
            stranger = Reader(gateway.resume(job.request.id, (), "other"))
            with pytest.raises(Status) as refused:
                await stranger.done()
            assert refused.value.code is Code.NOT_FOUND

    run(main())


def test_same_key_attaches_and_another_body_is_refused() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            first = Reader(gateway.generate(call("one", client_key="k")))
            job = await batcher.take()
            assert job.request.id == request_id_of("t", "k") and job.request.seed != 4242
            await first.accepted()
            again = Reader(gateway.generate(call("one", client_key="k")))
            with pytest.raises(Status) as superseded:
                await first.done()
            assert superseded.value.code is Code.ABORTED
            assert await again.accepted() == job.request.id
            wrong = Reader(gateway.generate(call("two", client_key="k")))
            with pytest.raises(Status) as refused:
                await wrong.done()
            assert refused.value.code is Code.ALREADY_EXISTS and "client_key" in refused.value.message
            await again.leave()

    run(main())


def test_lost_finish_is_found_in_the_record() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call()))
            job = await batcher.take()
            batcher.send(job, *b"ab")
            job.ids += b"c"
            await batcher.end(job, tell=False)
            await reader.done()
            assert reader.text == "abc"

    run(main())


@pytest.mark.parametrize("lost", [True, False])
def test_a_request_that_the_broker_lost_ends_and_one_that_waits_does_not(lost: bool) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, _):
            reader = Reader(gateway.generate(call()))
            request_id = await reader.accepted()
            stream = rig.broker.stream(subjects.REQUESTS)
            stored = stream.last(subjects.request_anywhere(request_id), 0.0)
            assert stored is not None
            if lost:
                stream.remove(stored.seq)
            await asyncio.sleep(60)
            if not lost:
                assert reader.error is None and reader.finished is None
                await reader.leave()
                return
            with pytest.raises(Status, match="lost") as raised:
                await reader.done()
            assert raised.value.code is Code.UNAVAILABLE and raised.value.retry_ms
            assert gateway.counts["request lost"] == 1

    run_virtual(main())


def test_takeover_question_is_answered_with_what_was_passed_on() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call()))
            job = await batcher.take()
            batcher.send(job, *b"ab")
            await until(lambda: reader.text == "ab")
            other = ScriptedBatcher(rig.bus("batcher2"), "batcher2")
            await other.start()
            question = TakeoverQuestion(job.request.id, Attempt(2), other.boot)
            other.bus.publish(subjects.TAKEOVER, build_takeover_question(question))
            await until(lambda: other.heard)
            yes = TakeoverAnswer(job.request.id, GatewayId(gateway.boot), Attempt(2), tuple(b"ab"), None)
            assert other.heard == [yes]
            batcher.send(job, ord("c"))
            await until(lambda: batcher.heard)
            refused = Refused(job.request.id, GatewayId(gateway.boot), Attempt(1), minimum=Attempt(2))
            assert batcher.heard == [refused]
            await reader.leave()

    run(main())


def test_cancel_by_id_at_another_gateway() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher), rig.gateway("gw2") as second:
            reader = Reader(gateway.generate(call()))
            job = await batcher.take()
            await reader.accepted()
            with pytest.raises(Status) as refused:
                await second.cancel(job.request.id, "other")
            assert refused.value.code is Code.NOT_FOUND
            await second.cancel(job.request.id, "t")
            await until(lambda: batcher.heard)
            assert batcher.heard == [CancelAsk(job.request.id, "client")]
            await batcher.end(job, Reason.CANCELLED)
            await reader.done()
            assert reader.finished is not None and reader.finished.reason is Reason.CANCELLED

    run(main())


def test_failed_request_is_an_error_with_its_cause() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call()))
            job = await batcher.take()
            await batcher.end(job, Reason.FAILED, error="worker died three times")
            with pytest.raises(Status, match="worker died three times") as failed:
                await reader.done()
            assert failed.value.code is Code.INTERNAL

    run(main())


class LosesPublishes(Habits):
    """Answers to publishes of requests are lost; all else is well."""

    def call(self, sender: str, what: str, subject: str) -> Fate:
        lost = what == "append" and subject.startswith("shoal.req.")
        return Fate(0.0, None) if lost else Fate()


def test_timed_out_publish_is_unavailable_and_the_log_says_cancel() -> None:
    async def main() -> None:
        rig = Rig(LosesPublishes())
        async with rig.standing(publish_timeout_s=0.1) as (gateway, _):
            reader = Reader(gateway.generate(call()))
            with pytest.raises(Status) as failed:
                await reader.done()
            assert failed.value.code is Code.UNAVAILABLE and failed.value.retry_ms
            await until(lambda: gateway._streams.idle)
            [message] = await rig.bus("reader").read(subjects.REQUESTS, "shoal.req.>", 0, 10)
            request_id = RequestId(message.subject.rpartition(".")[2])
            assert await records(rig, request_id) == [Cancel(Attempt(0), "", "unavailable")]  # type: ignore[arg-type]

    run(main())


def test_timed_out_keyed_publish_is_what_the_retry_attaches_to() -> None:
    async def main() -> None:
        rig = Rig(LosesPublishes())
        async with rig.standing(publish_timeout_s=0.1) as (gateway, batcher):
            reader = Reader(gateway.generate(call(client_key="k")))
            with pytest.raises(Status):
                await reader.done()
            job = await batcher.take()
            assert await records(rig, job.request.id) == [
                Claim(Attempt(1), batcher.boot, job.request.body_digest)
            ]

    run(main())


def test_garbage_on_each_subject_disturbs_nothing() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call()))
            job = await batcher.take()
            stranger = rig.bus("stranger")
            evil = build_takeover_question(TakeoverQuestion(job.request.id, Attempt(9), "a.b *>"))  # type: ignore[arg-type]
            evil_chunk = build_chunk(Chunk(BootId("a.b *>"), 1, (), ()))
            for data in (b"", b"\xff\xff", b"\x0a\x02\xff\xfe", evil, evil_chunk):
                stranger.publish(subjects.chunks(GatewayId(gateway.boot)), data)
                stranger.publish(subjects.TAKEOVER, data)
            await stranger.put_entry("model.odd", b"\xff\xff\xff")
            await stranger.append(subjects.request("bytes", 5, RequestId("junk")), b"\xff\xff")
            with pytest.raises(Status):
                await gateway.cancel("junk", "t")
            await until(lambda: gateway.counts.get("bad message", 0) == 10)
            batcher.send(job, *b"ok")
            await batcher.end(job)
            await reader.done()
            assert reader.text == "ok"

    run(main())


def test_drain_lets_streams_end_and_sends_the_others_elsewhere() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing(drain_wait_s=0.2) as (gateway, batcher):
            ends, stays = Reader(gateway.generate(call("a"))), Reader(gateway.generate(call("b")))
            jobs = [await batcher.take(), await batcher.take()]
            await ends.accepted()
            await stays.accepted()
            draining = asyncio.create_task(gateway.drain())
            await until(lambda: not gateway.ready)
            late = Reader(gateway.generate(call("c")))
            with pytest.raises(Status, match="draining"):
                await late.done()
            [job] = [j for j in jobs if j.request.id == ends.request_id]
            await batcher.end(job)
            await ends.done()
            with pytest.raises(Status, match="resume") as sent_away:
                await stays.done()
            assert sent_away.value.code is Code.UNAVAILABLE
            await draining
            assert await rig.bus("reader").entry(subjects.gateway_key(gateway.boot)) is None

    run(main())


def test_killed_gateway_releases_its_clients() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.serve_model(byte_card())
        batcher = ScriptedBatcher(rig.bus("batcher1"))
        await batcher.start()
        async with rig.gateway() as gateway:
            await until(lambda: gateway.ready)
            reader = Reader(gateway.generate(call()))
            await batcher.take()
            await reader.accepted()
        with pytest.raises(Status) as gone:
            await reader.done()
        assert gone.value.code is Code.UNAVAILABLE
        with pytest.raises(Status, match="not running"):
            await anext(gateway.generate(call()))

    run(main())


# ---- models ----------------------------------------------------------------------------------------


def test_a_key_is_told_of_what_it_may_use_and_means_it_where_it_names_none() -> None:
    async def main() -> None:
        rig = Rig()
        keys = {"k": ApiKey(sha256="0" * 64, models=("bytes",)), "all": ApiKey(sha256="0" * 64)}
        keys["other"] = ApiKey(sha256="0" * 64, models=("third",))
        async with rig.standing(keys=keys) as (gateway, _):
            await rig.serve_model(byte_card("second"))
            await until(lambda: len(gateway.list_models()) == 2)
            assert await gateway.tokenize(call("a", key="k")) == (97,)
            with pytest.raises(Status, match="name one of bytes, second$"):
                await gateway.tokenize(call("a", key="all"))
            with pytest.raises(Status, match="'none' is not served; served now: bytes, second$"):
                await gateway.tokenize(call("a", key="all", model="none"))
            with pytest.raises(Status, match="'third' is not served; served now: none$"):
                await gateway.tokenize(call("a", key="other", model="third"))
            with pytest.raises(Status) as refused:
                await gateway.tokenize(call("a", key="other"))
            assert refused.value.code is Code.PERMISSION_DENIED and "bytes" not in refused.value.message

    run(main())


def test_models_are_found_by_name_and_the_only_one_without() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, _):
            assert await gateway.tokenize(call("a")) == (97,)
            with pytest.raises(Status, match="'none' is not served; served now: bytes$") as unknown:
                await gateway.tokenize(call("a", model="none"))
            assert unknown.value.code is Code.NOT_FOUND
            await rig.serve_model(byte_card("second", chat_template=""))
            await until(lambda: len(gateway.list_models()) == 2)
            with pytest.raises(Status, match="bytes, second"):
                await gateway.tokenize(call("a"))
            with pytest.raises(Status, match="no chat template"):
                await gateway.tokenize(GenerateCall(model="second", chat=(Turn("user", "x"),)))
            await rig.bus("worker").delete_entry(subjects.model_key("second"))
            await until(lambda: len(gateway.list_models()) == 1)
            assert await gateway.tokenize(call("a")) == (97,)

    run(main())


def test_what_is_no_prompt_is_not_tokenized_either() -> None:
    async def main() -> None:
        async with Rig().standing(prompt_bytes_max=1000) as (gateway, _):
            for asked, said in (
                (call(""), "prompt: 0 bytes; 1 to 1000"),
                (call("x" * 1001), "prompt: 1001 bytes; 1 to 1000"),
                (GenerateCall(chat=(Turn("", "x"),)), r"chat.turns\[0\].role: 1 to 64 bytes"),
                (GenerateCall(), "input: exactly one of chat, prompt"),
            ):
                with pytest.raises(Status, match=said) as refused:
                    await gateway.tokenize(asked)
                assert refused.value.code is Code.INVALID_ARGUMENT

    run(main())


def test_without_a_model_clients_are_told_to_come_back() -> None:
    async def main() -> None:
        async with Rig().gateway() as gateway:
            reader = Reader(gateway.generate(call()))
            with pytest.raises(Status, match="none is served") as refused:
                await reader.done()
            assert refused.value.code is Code.UNAVAILABLE and refused.value.retry_ms
            assert not gateway.ready

    run(main())


def test_a_new_card_replaces_the_old_and_a_broken_one_does_not() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, _):
            await rig.serve_model(byte_card(context_len_max=8))
            await until(lambda: gateway.list_models()[0].context_len_max == 8)
            await rig.serve_model(byte_card(tokenizer_json=b"{}", context_len_max=16))
            await rig.serve_model(byte_card("other"))
            await until(lambda: len(gateway.list_models()) == 2)
            assert gateway.list_models()[0].context_len_max == 8

    run(main())


def test_a_bad_card_is_fetched_ever_later_and_a_new_one_at_once() -> None:
    fetched: list[str] = []

    class Watching(Habits):
        def call(self, sender: str, what: str, subject: str) -> Fate:
            if what == "object":
                fetched.append(sender)
            return Fate()

    async def main() -> None:
        rig = Rig(Watching())
        await rig.serve_model(byte_card(tokenizer_json=b"{}"))
        async with rig.gateway() as gateway:
            for _ in range(60):  # workers refresh their entry, clients ask
                await asyncio.sleep(5)
                await rig.serve_model(byte_card(tokenizer_json=b"{}"))
            assert 10 <= len(fetched) <= 17, "0.5 s, doubled up to 30 s"
            await rig.serve_model(byte_card())
            await until(lambda: gateway.ready, timeout_s=0.5)

    run_virtual(main())


def test_long_texts_are_encoded_beside_the_loop() -> None:
    async def main() -> None:
        async with Rig().standing(inline_encode_bytes_max=10) as (gateway, _):
            assert await gateway.tokenize(call("x" * 5000)) == (120,) * 5000

    run(main())


def test_a_stop_token_shows_its_id_and_not_its_text() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call(stop_token_ids=(ord("."),))))
            job = await batcher.take()
            batcher.send(job, *b"ab")
            batcher.send(job, ord("."))
            await until(lambda: len(reader.ids) == 3)
            assert reader.text == "ab"
            await batcher.end(job, byte_cut=2)
            await reader.done()
            assert reader.text == "ab"

    run(main())


def test_resume_with_more_ids_than_any_context_is_refused_at_the_door() -> None:
    """A million of them would keep all other streams waiting for two seconds."""

    async def main() -> None:
        async with Rig().standing() as (gateway, _):
            with pytest.raises(Status, match="output_ids: 1048576; at most 4095") as refused:
                await anext(gateway.resume("r1", (1,) * (1 << 20), "t"))
            assert refused.value.code is Code.INVALID_ARGUMENT

    run(main())


def test_resume_joins_the_trace_of_its_request() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            first = Reader(gateway.generate(call(resume_window_s=9), TraceContext(b"c" * 16, b"d" * 8)))
            job = await batcher.take()
            await first.accepted()
            await first.leave()
            again = Reader(gateway.resume(job.request.id, (), "t"))
            await again.accepted()
            await batcher.end(job)
            await again.done()
            spans, _ = rig.tracer.take()
            assert {span.context.trace_id for span in spans} == {b"c" * 16}
            [root] = [span for span in spans if span.name == "gateway.generate"]
            [resumed] = [span for span in spans if span.name == "gateway.resume"]
            assert (root.parent, resumed.parent) == (b"d" * 8, root.context.span_id)
            assert root.error == "CANCELLED" and resumed.error is None

    run(main())


def test_idle_streams_are_cheap() -> None:
    """Under 64 KB a stream, of which gRPC takes 16."""

    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            readers = [Reader(gateway.generate(call())) for _ in range(20)]
            await until(lambda: all(reader.events for reader in readers))
            tracemalloc.start()
            more = [Reader(gateway.generate(call())) for _ in range(200)]
            await until(lambda: all(reader.events for reader in more))
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held / len(more) < 48 * 1024
            for reader in readers + more:
                await reader.leave()

    run(main())
