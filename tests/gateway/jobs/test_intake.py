"""Jobs through a gateway: over the in-memory bus, with a batcher that does as it is told."""

import asyncio
from typing import Any

import pytest

from chassis import subjects
from chassis.bus import Stored
from chassis.errors import Code, SubjectTaken, WrongSequence
from chassis.job_subjects import JobName, answer, job, letter_of
from chassis.messages.jobs import (
    CANCELLED,
    EXPIRED,
    Form,
    build_line,
    cancelled,
    parse_answer_line,
    parse_letter,
)
from chassis.messages.request import Reason, Terminal
from chassis.wire import gateway_pb2, jobs_pb2
from gateway.admission import request_id_of
from gateway.jobs.events import Failed, LetGo, Run
from tests.gateway.rig import Rig, run, until

PROTOBUF = {"Content-Type": "application/x-protobuf"}
NAME = JobName("t", "q", "k")


def call_data(prompt: str = "hi", **fields: Any) -> bytes:
    return gateway_pb2.GenerateRequest(prompt=prompt, **fields).SerializeToString()


async def publish(rig: Rig, name: JobName = NAME, data: bytes = b"", **headers: str) -> None:
    said = {key.replace("_", "-"): value for key, value in headers.items()}
    await rig.bus("client").append(job(name), data or call_data(), headers=PROTOBUF | said)


async def answered(rig: Rig, name: JobName = NAME, timeout_s: float = 5.0) -> Stored:
    return await stored_under(rig, answer(name), timeout_s)


async def stored_under(rig: Rig, subject: str, timeout_s: float = 5.0) -> Stored:
    def found() -> list[Stored]:
        stream = rig.broker.streams.get(subjects.ANSWERS)
        return [m for m in stream.messages() if m.subject == subject] if stream else []

    await until(found, timeout_s)
    (message,) = found()
    return message


def read(stored: Stored) -> jobs_pb2.Answer:
    return jobs_pb2.Answer.FromString(stored.data)


async def taken_away(rig: Rig, name: JobName = NAME) -> None:
    stream = rig.broker.streams[subjects.JOBS]
    await until(lambda: not [m for m in stream.messages() if m.subject == job(name)])


def test_a_job_is_run_answered_and_taken_away() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            await publish(rig)
            held = await batcher.take(priority=9)
            assert held.request.tenant == "t"
            assert held.request.id == request_id_of("t", NAME.client_key)
            assert held.request.resume_window_ms == 0xFFFFFFFF and held.request.keyed
            batcher.send(held, *b"yes")
            await batcher.end(held)
            stored = await answered(rig)
            said = read(stored)
            assert (said.status_code, said.request_id) == (200, held.request.id)
            assert "".join(e.delta.text for e in said.events) == "yes"
            assert stored.headers["Shoal-Status"] == "200"
            await taken_away(rig)

    run(main())


def test_one_that_is_wrong_is_told_so_once() -> None:
    cases: list[tuple[JobName, bytes, dict[str, str], str]] = [
        (JobName("t", "q", "a"), b"\xff", {}, "not a GenerateRequest"),
        (JobName("t", "q", "b"), call_data(temperature=3.0), {}, "temperature"),
        (JobName("t", "q", "c"), call_data(), {"Shoal_Timeout_Ms": "soon"}, "Shoal-Timeout-Ms"),
        (JobName("t", "q", "d"), call_data(""), {}, "prompt"),
    ]

    async def main() -> None:
        rig = Rig()
        async with rig.standing():
            for name, data, headers, what in cases:
                await publish(rig, name, data, **headers)
                said = read(await answered(rig, name))
                assert said.status_code == 400 and what in said.error
                await taken_away(rig, name)

    run(main())


@pytest.mark.parametrize("tokens", ["t.q.a%b", "t.q.=61", f"{'t' * 200}.q.k"])
def test_tokens_that_nothing_is_written_as_are_told_so(tokens: str) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing():
            bus = rig.bus("client")
            await bus.append(f"shoal.job.{tokens}", b"{}")
            line = parse_answer_line((await stored_under(rig, f"shoal.ans.{tokens}")).data)
            assert line.status_code == 400 and line.body is not None
            assert "subject" in line.body["error"]["message"]

    run(main())


def test_a_job_whose_answer_is_there_is_not_run() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            bus = rig.bus("client")
            await bus.append(answer(NAME), cancelled("r", Form.JSON, "c"), expected_seq=0)
            await publish(rig)
            await taken_away(rig)
            assert parse_answer_line((await answered(rig)).data).error_code == CANCELLED
            with pytest.raises((WrongSequence, SubjectTaken)):
                await bus.append(answer(NAME), b"another", expected_seq=0)
            assert not await batcher.bus.fetch(subjects.REQUESTS, subjects.consumer_name("bytes", 9), 1, 0.1)

    run(main())


def test_the_gateway_dies_and_another_finds_the_request() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            await publish(rig)
            held = await batcher.take(priority=9)
            batcher.send(held, *b"half")
        async with rig.gateway("gw2"):
            await batcher.end(held)
            said = read(await answered(rig, timeout_s=15))
            assert "".join(e.delta.text for e in said.events) == "half"
            await taken_away(rig)
            stream = rig.broker.streams[subjects.REQUESTS]
            assert not list(stream.messages()), "it was not asked for twice"

    run(main(), 30)


def test_a_drained_gateway_gives_its_jobs_back_at_once() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing(drain_wait_s=0.1) as (gateway, batcher), rig.gateway("gw2") as other:
            await until(lambda: other.ready)
            other_jobs, jobs = other._jobs, gateway._jobs
            assert jobs is not None and other_jobs is not None
            await publish(rig)
            held = await batcher.take(priority=9)
            first = gateway if not jobs.idle else other
            last = other_jobs if first is gateway else jobs
            await first.drain()
            await until(lambda: not last.idle)
            await batcher.end(held)
            assert read(await answered(rig)).status_code == 200

    run(main())


def test_what_ends_just_as_the_gateway_lets_go_trips_nothing_up() -> None:
    """Its run is over, and that waits to be heard behind the word to let go."""

    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, _):
            jobs = gateway._jobs
            assert jobs is not None
            over = asyncio.Event()

            async def end(effect: Run) -> Failed:
                await over.wait()
                return Failed("r", Code.UNAVAILABLE, "gone")

            jobs._runner.run = end  # type: ignore[method-assign]
            await publish(rig)
            await until(lambda: jobs._runs)
            await asyncio.sleep(0.01)
            over.set()
            jobs._put(LetGo(asyncio.get_running_loop().time()))
            await until(lambda: jobs.idle and not jobs._runs)
            await asyncio.sleep(0.01)
            assert gateway.ready

    run(main())


def test_its_time_is_over_before_it_runs_and_while_it_runs() -> None:
    async def main() -> None:
        rig = Rig()
        late = JobName("t", "q", "late")
        await publish(rig, late, Shoal_Timeout_Ms="1")
        await asyncio.sleep(0.01)
        async with rig.standing() as (_, batcher):
            assert read(await answered(rig, late)).error_code == EXPIRED
            await publish(rig, Shoal_Timeout_Ms="60000")
            held = await batcher.take(priority=9)
            assert 50_000 < held.request.timeout_ms <= 60_000
            await batcher.end(held, Reason.DEADLINE)
            said = read(await answered(rig))
            assert (said.status_code, said.error_code) == (0, EXPIRED)

    run(main())


def test_a_cancelled_request_is_a_cancelled_job() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, batcher):
            await publish(rig)
            held = await batcher.take(priority=9)
            await gateway.cancel(held.request.id, "t")
            await batcher.end(held, Reason.CANCELLED)
            assert read(await answered(rig)).error_code == CANCELLED

    run(main())


def test_a_failed_one_is_dead_and_says_so() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            await publish(rig, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01")
            held = await batcher.take(priority=9)
            assert held.request.trace_parent[:16] == b"\x11" * 16
            await batcher.end(held, Reason.FAILED, error="ended after 3 worker and 0 batcher deaths")
            said = read(await answered(rig))
            assert said.status_code == 500 and "3 worker" in said.error
            stored = await rig.bus("reader").last(subjects.DEAD, letter_of(job(NAME)))
            assert stored is not None
            letter = parse_letter(stored.data)
            assert (letter.subject, letter.request_id) == (job(NAME), said.request_id)
            assert letter.body == call_data()
            assert isinstance(letter.records[-1][1], Terminal)
            assert letter.headers["traceparent"].startswith("00-1111")

    run(main())


def test_a_refused_request_is_asked_for_anew() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            await publish(rig)
            first = await batcher.take(priority=9)
            await batcher.end(first, Reason.REFUSED, error="the queue is full")
            again = await batcher.take(priority=9)
            assert again.request.id == request_id_of("t", NAME.client_key + "~1")
            await batcher.end(again)
            said = read(await answered(rig))
            assert (said.status_code, said.request_id) == (200, again.request.id)

    run(main())


def test_the_model_is_waited_for_then_missed() -> None:
    async def main() -> None:
        rig = Rig()
        patient = JobName("t", "q", "unknown")
        async with rig.standing(jobs_model_wait_s=0.0):
            await publish(rig, patient, call_data(model="nobody"))
            said = read(await answered(rig, patient))
            assert said.status_code == 404 and "nobody" in said.error
        async with rig.gateway("gw2"):
            waits = JobName("t", "q", "waits")
            await publish(rig, waits, call_data(model="nobody"))
            await asyncio.sleep(0.3)
            assert await rig.bus("reader").last(subjects.ANSWERS, answer(waits)) is None

    run(main())


def test_another_body_under_the_key_of_a_request_is_a_409() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            await publish(rig)
            held = await batcher.take(priority=9)
            await batcher.end(held)
            await answered(rig)
            stream = rig.broker.streams[subjects.ANSWERS]
            for message in list(stream.messages()):
                stream.remove(message.seq)  # its time was over
            await taken_away(rig)
            await publish(rig, data=call_data("other"))
            assert read(await answered(rig)).status_code == 409

    run(main())


def test_a_priority_is_taken_only_as_far_as_jobs_may_go() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing(jobs_priority_best=3) as (_, batcher):
            await publish(rig, Shoal_Priority="0")
            held = await batcher.take(priority=3)
            assert held.request.id == request_id_of("t", NAME.client_key)

    run(main())


def test_a_door_that_trips_is_an_answer() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (gateway, _):
            jobs = gateway._jobs
            assert jobs is not None

            async def trips(*given: object) -> tuple[int, dict[str, Any]]:
                raise ZeroDivisionError

            jobs._runner._answer = trips
            line = build_line("c", "/v1/completions", {"prompt": "x"})
            await rig.bus("client").append(job(NAME), line)
            said = parse_answer_line((await answered(rig)).data)
            assert (said.status_code, said.custom_id) == (500, "c")

    run(main())


def test_a_gateway_may_take_none() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing(jobs_at_once_max=0) as (gateway, _):
            assert gateway._jobs is None

    run(main())


def line(url: str, **body: Any) -> bytes:
    return build_line("c1", url, body)


def test_lines_of_openai_are_run() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (_, batcher):
            bus = rig.bus("client")
            chat, text = JobName("", "q", "chat"), JobName("", "q", "text")
            turns = [{"role": "user", "content": "hi"}]
            await bus.append(job(chat), line("/v1/chat/completions", model="bytes", messages=turns))
            await bus.append(
                job(text), line("/v1/completions", model="bytes", prompt=["a", "b"], max_tokens=2)
            )
            for _ in range(3):
                held = await batcher.take(priority=9)
                assert held.request.keyed and held.request.resume_window_ms == 0xFFFFFFFF
                batcher.send(held, *b"ok")
                await batcher.end(held, Reason.LENGTH)
            for name, kind in ((chat, "chat.completion"), (text, "text_completion")):
                stored = await answered(rig, name)
                said = parse_answer_line(stored.data)
                assert said.ok and said.custom_id == "c1" and said.body is not None
                assert said.request_id == request_id_of("", name.client_key)
                assert said.body["object"] == kind
                assert stored.headers["Content-Type"] == "application/json"
                assert len(said.body["choices"]) == (2 if name is text else 1)
                await taken_away(rig, name)

    run(main())


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"prompt": "x", "temperature": 9}, "temperature"),
        ({"prompt": "x", "stream": True}, "stream"),
        ({"prompt": "x", "n": 0}, "n"),
        ({}, "prompt"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    ],
)
def test_lines_that_are_wrong_say_what_openai_would(body: dict[str, Any], what: str) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing():
            await rig.bus("client").append(job(NAME), line("/v1/completions", model="bytes", **body))
            said = parse_answer_line((await answered(rig)).data)
            assert said.status_code == 400 and said.body is not None and said.custom_id == "c1"
            error = said.body["error"]
            assert what in error["message"] and error["type"] == "invalid_request_error"

    run(main())
