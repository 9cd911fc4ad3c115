"""A job counts to the quotas of the key it names; nobody waits for it, so it takes no slot."""

from chassis import subjects
from chassis.job_subjects import JobName, answer
from chassis.messages.jobs import KEY
from chassis.messages.quota import parse_ledger
from tests.gateway.access.test_quota import fixed_clock, key, reader
from tests.gateway.jobs.test_intake import answered, call_data, publish, read
from tests.gateway.rig import Rig, run

TERMS = {KEY: "abc"}


async def counted(rig: Rig) -> int:
    stored = await rig.bus("reader").last(subjects.QUOTAS, subjects.quota("abc"))
    return sum(w.granted for w in parse_ledger(stored.data).windows) if stored is not None else 0


def test_jobs_wait_while_their_keys_quota_is_used_up() -> None:
    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        keys = {"abc": key(requests_per_minute=2, concurrent_requests=1)}
        async with rig.standing(keys=keys) as (gateway, batcher):
            line = reader(gateway)
            held = [await batcher.take()]
            first, second, ours = (JobName("acme", "q", name) for name in ("first", "second", "ours"))
            await publish(rig, first, call_data("hi", max_tokens=4), **TERMS)
            held.append(await batcher.take(priority=9))
            assert held[1].request.key == "abc" and held[1].request.tenant == "acme"
            await publish(rig, second, call_data("hi", max_tokens=4), **TERMS)
            await publish(rig, ours)
            held.append(await batcher.take(priority=9))
            assert held[2].request.key == ""
            for one in held:
                await batcher.end(one)
            await line.done()
            await answered(rig, first)
            await answered(rig, ours)
            assert answer(second) not in _answers(rig), "it waits for the next minute"

    run(main())


def _answers(rig: Rig) -> list[str]:
    stream = rig.broker.streams.get(subjects.ANSWERS)
    return [m.subject for m in stream.messages()] if stream is not None else []


def test_a_job_larger_than_the_whole_quota_is_told_so() -> None:
    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        async with rig.standing(keys={"abc": key(tokens_per_minute=10)}):
            name = JobName("acme", "q", "k")
            await publish(rig, name, call_data("p" * 20, max_tokens=4), **TERMS)
            said = read(await answered(rig, name))
            assert said.status_code == 429 and "tokens_per_minute" in said.error

    run(main())


def test_a_key_of_another_tenant_or_none_that_is_there_counts_for_nobody() -> None:
    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        keys = {"abc": key(requests_per_minute=1, priority_best=0, priority_worst=4)}
        async with rig.standing(keys=keys) as (_, batcher):
            for number, (tenant, named) in enumerate((("other", "abc"), ("acme", "gone"), ("acme", ""))):
                name = JobName(tenant, "q", f"k{number}")
                terms = {KEY: named} if named else {}
                await publish(rig, name, call_data(), **terms)
                held = await batcher.take(priority=9)
                assert held.request.key == ""
                await batcher.end(held)
                assert read(await answered(rig, name)).status_code == 200
            assert await counted(rig) == 0
            name = JobName("acme", "q", "mine")  # what the key may ask for on the line is no matter here
            await publish(rig, name, call_data(), **TERMS)
            held = await batcher.take(priority=9)
            await batcher.end(held)
            assert read(await answered(rig, name)).status_code == 200
            assert await counted(rig) >= 1

    run(main())


def test_a_header_that_names_no_key_is_told() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing():
            await publish(rig, JobName("acme", "q", "k"), call_data(), **{KEY: "a b"})
            said = read(await answered(rig, JobName("acme", "q", "k")))
            assert said.status_code == 400 and said.error.startswith(KEY)

    run(main())
