"""Quotas: what a purse lets through, what gateways never exceed together, and what by how much."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis import subjects
from chassis.api_keys import ApiKey, digest_of, make_token
from chassis.errors import Code, Status
from chassis.habits import Fate, Habits
from chassis.ids import BootId
from chassis.messages.quota import Meter, QuotaLedger, Share, Window, build_ledger, parse_ledger
from gateway.access.quota import (
    IDLE_MS,
    MINUTE_MS,
    OUTPUT_RESERVED,
    SHARE_MS,
    Need,
    Plan,
    Purse,
    Short,
)
from gateway.access.quotas import Quotas
from gateway.service import Gateway
from tests.gateway.rig import Reader, Rig, call, run, until
from tests.sim.loop import run as run_virtual

TOKEN = make_token("abc", "s" * 43)
NOW_MS = 100 * 24 * 60 * MINUTE_MS + 5_000


def key(**limits: int) -> ApiKey:
    return ApiKey(digest_of(TOKEN), "acme", **limits)  # type: ignore[arg-type]


class Shared:
    """A ledger and the purses of some gateways, each write at once."""

    def __init__(self, count: int, terms: ApiKey) -> None:
        self.ledger = QuotaLedger()
        self.purses = [Purse(BootId(f"g{i}"), terms) for i in range(count)]

    def take(self, index: int, need: Need, now_ms: int) -> Short | None:
        purse = self.purses[index]
        while not purse.take(need, now_ms):
            short = purse.refused(need, now_ms) or self.write(index, need, now_ms)
            if short is not None:
                return short
        return None

    def write(self, index: int, need: Need, now_ms: int) -> Short | None:
        planned = self.purses[index].plan(self.ledger, need, now_ms)
        if isinstance(planned, Short):
            return planned
        self.commit(index, planned, now_ms)
        return None

    def commit(self, index: int, planned: Plan, now_ms: int) -> None:
        self.ledger = parse_ledger(build_ledger(planned.ledger))
        self.purses[index].gain(planned, now_ms)

    def give_back(self, index: int, now_ms: int) -> None:
        purse = self.purses[index]
        self.commit(index, purse.plan_return(self.ledger, purse.empty_out(now_ms), now_ms), now_ms)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "leave", "charge", "tend", "return", "wait"]),
        st.integers(0, 2),
        st.integers(1, 40),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 30), st.integers(1, 300), st.integers(1, 6))
def test_gateways_together_exceed_nothing_that_is_exact(
    steps: list[tuple[str, int, int]], requests: int, tokens: int, at_once: int
) -> None:
    terms = key(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=at_once)
    shared, now_ms = Shared(3, terms), NOW_MS
    let_in: dict[int, int] = {}  # by minute
    spent: dict[int, int] = {}
    extra: dict[int, int] = {}
    for what, index, amount in steps:
        purse, minute = shared.purses[index], now_ms // MINUTE_MS
        match what:
            case "take":
                if shared.take(index, Need(1, amount, True), now_ms) is None:
                    let_in[minute] = let_in.get(minute, 0) + 1
                    spent[minute] = spent.get(minute, 0) + amount
                    assert sum(p.used for p in shared.purses) <= at_once
            case "leave" if purse.used:
                purse.leave()
            case "charge" if purse.used:
                purse.charge(amount, now_ms)
                extra[minute] = extra.get(minute, 0) + amount
            case "tend" if purse.due(now_ms):
                assert shared.write(index, Need(), now_ms) is None
            case "return":
                shared.give_back(index, now_ms)
            case "wait":
                now_ms += amount * 500
                for i in range(3):  # each reaches the bus in time
                    shared.write(i, Need(), now_ms)
        assert all(count <= requests for count in let_in.values())
        assert all(count <= tokens for count in spent.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 4))
def test_all_of_a_quota_can_be_used_and_few_writes_do_it(limit: int, count: int) -> None:
    shared = Shared(count, key(requests_per_minute=limit))
    writes = taken = 0
    for i in range(limit):
        purse = shared.purses[i % count]
        if not purse.take(Need(1), NOW_MS):
            if shared.write(i % count, Need(1), NOW_MS) is not None:
                break
            writes += 1
            assert purse.take(Need(1), NOW_MS)
        taken += 1
    stranded = sum(p.balances[Meter.REQUESTS_PER_MINUTE].left for p in shared.purses if p.balances)
    assert taken + stranded == limit
    assert stranded <= (count - 1) * (1 + limit // 16)
    assert writes < 32 + 120 * count
    if count == 1:
        assert taken == limit


def test_windows_turn_and_tell_when() -> None:
    shared = Shared(2, key(requests_per_minute=1))
    assert shared.take(0, Need(1), NOW_MS) is None
    assert shared.take(1, Need(1), NOW_MS) == Short("requests_per_minute", 1, MINUTE_MS - 5_000)
    assert shared.take(1, Need(1), NOW_MS + MINUTE_MS - 5_000) is None
    days = Shared(1, key(tokens_per_day=5))
    short = days.take(0, Need(1, 6), NOW_MS)
    assert short == Short("tokens_per_day", 5, None), "it never will"


def test_clocks_that_differ_use_windows_of_their_own() -> None:
    """A clock an hour ahead keeps nobody out when it is set right."""
    shared = Shared(2, key(requests_per_minute=2))
    for now_ms in (NOW_MS + 60 * MINUTE_MS, NOW_MS):
        assert [shared.take(0, Need(1), now_ms) for _ in range(2)] == [None, None]
        assert shared.take(1, Need(1), now_ms) is not None
    for i in range(50):
        shared.take(0, Need(1), NOW_MS + i * MINUTE_MS)
    assert len(shared.ledger.windows) <= 3


def test_slots_end_by_themselves_when_a_gateway_is_gone() -> None:
    shared = Shared(2, key(concurrent_requests=1))
    assert shared.take(0, Need(slot=True), NOW_MS) is None
    assert shared.take(1, Need(slot=True), NOW_MS + SHARE_MS - 1) is not None
    assert shared.take(1, Need(slot=True), NOW_MS + SHARE_MS + 60) is None
    assert [s.boot for s in shared.ledger.shares] == ["g1"]


def test_debts_are_told_and_keep_others_out() -> None:
    shared = Shared(2, key(tokens_per_minute=100))
    assert shared.take(0, Need(1, 10), NOW_MS) is None
    shared.purses[0].charge(200, NOW_MS)
    assert shared.purses[0].due(NOW_MS)
    shared.write(0, Need(), NOW_MS)
    assert not shared.purses[0].due(NOW_MS)
    assert shared.ledger.windows == (Window(Meter.TOKENS_PER_MINUTE, NOW_MS // MINUTE_MS, 210),)
    for index in (0, 1):
        assert shared.take(index, Need(1, 1), NOW_MS) is not None


def test_what_is_given_back_is_there_for_others() -> None:
    shared = Shared(2, key(tokens_per_day=100, concurrent_requests=32))
    assert shared.take(0, Need(1, 90, True), NOW_MS) is None
    assert shared.take(1, Need(1, 60), NOW_MS) is not None
    shared.purses[0].refund(80, NOW_MS, NOW_MS)
    shared.purses[0].leave()
    later = NOW_MS + IDLE_MS + 1
    assert shared.purses[0].idle(later) and not shared.purses[0].empty
    shared.give_back(0, later)
    assert shared.purses[0].empty and not shared.ledger.shares
    assert shared.take(1, Need(1, 60), later) is None


@given(
    st.lists(
        st.builds(Window, st.sampled_from(Meter), st.integers(0, 1 << 60), st.integers(0, 1 << 60)),
        max_size=9,
    )
)
def test_ledgers_come_back(windows: list[Window]) -> None:
    ledger = QuotaLedger(tuple(windows), (Share(BootId("g"), 3, 1 << 50),))
    assert parse_ledger(build_ledger(ledger)) == ledger


# ---- over the bus ----------------------------------------------------------------------------------


def test_two_gateways_that_race_for_a_ledger_let_in_exactly_the_quota() -> None:
    async def main() -> None:
        rig = Rig()
        terms = key(requests_per_minute=40, concurrent_requests=25)
        wall_ns = NOW_MS * 1_000_000
        quotas = [Quotas(rig.bus(f"g{i}"), BootId(f"g{i}"), lambda: wall_ns) for i in range(2)]
        refusals: list[Status] = []
        running = most = let_in = 0

        async def one(index: int) -> None:
            nonlocal running, most, let_in
            try:
                async with quotas[index % 2].hold("abc", terms, Need(1, 10, True)):
                    let_in, running = let_in + 1, running + 1
                    most = max(most, running)
                    await asyncio.sleep(0.02)
                    running -= 1
            except Status as status:
                refusals.append(status)

        async with asyncio.TaskGroup() as group:
            tending = [group.create_task(q.run()) for q in quotas]
            for _ in range(4):
                await asyncio.gather(*(one(i) for i in range(30)))
            for task in tending:
                task.cancel()
        assert most <= 25 and let_in <= 40
        assert let_in >= 40 - 2 - 40 // 16, "but for what one of them still holds"
        assert {s.code for s in refusals} == {Code.RESOURCE_EXHAUSTED}
        assert all(s.retry_ms is not None and "quota" in s.message for s in refusals)

    run(main())


def test_nothing_is_granted_while_the_ledger_cannot_be_written() -> None:
    async def main() -> None:
        class Deaf(Habits):
            def call(self, sender: str, what: str, subject: str) -> Fate:
                return Fate(None) if what == "append" else Fate()

        rig = Rig(Deaf())
        quotas = Quotas(rig.bus("g"), BootId("g"), lambda: NOW_MS * 1_000_000)
        with pytest.raises(Status) as refused:
            await quotas.spend("abc", key(requests_per_minute=5), Need(1))
        assert refused.value.code is Code.UNAVAILABLE and refused.value.retry_ms

    run_virtual(main())


@pytest.mark.parametrize("left", [4, -3])
def test_what_goes_back_goes_back_although_another_wrote_meanwhile(left: int) -> None:
    async def main() -> None:
        rig, terms = Rig(), key(tokens_per_day=160)
        mine, other = (Quotas(rig.bus(name), BootId(name), lambda: NOW_MS * 1_000_000) for name in "gh")
        await mine.spend("abc", terms, Need(1, 6))  # of ten
        account = mine._accounts["abc"]
        account.purse.charge(account.purse.balances[Meter.TOKENS_PER_DAY].left - left, NOW_MS)
        await other.spend("abc", terms, Need(1, 1))
        await mine.give_back()
        stored = await rig.bus("reader").last(subjects.QUOTAS, subjects.quota("abc"))
        assert stored is not None
        (window,) = parse_ledger(stored.data).windows
        others = other._accounts["abc"].purse.balances[Meter.TOKENS_PER_DAY].left + 1
        assert window.granted == others + 10 - left

    run(main())


def test_a_debt_that_could_not_be_told_is_still_one() -> None:
    async def main() -> None:
        class Deaf(Habits):
            deaf = False

            def call(self, sender: str, what: str, subject: str) -> Fate:
                return Fate(None) if what == "append" and self.deaf else Fate()

        habits = Deaf()
        quotas = Quotas(Rig(habits).bus("g"), BootId("g"), lambda: NOW_MS * 1_000_000)
        await quotas.spend("abc", key(tokens_per_day=160), Need(1, 6))
        balance = quotas._accounts["abc"].purse.balances[Meter.TOKENS_PER_DAY]
        for left in (-3, 4):
            balance.left, habits.deaf = left, True
            await quotas.give_back()
            assert balance.left == min(left, 0), "what was left may be another's by now"

    run_virtual(main())


# ---- whole gateways --------------------------------------------------------------------------------


def reader(gateway: Gateway, **asked: Any) -> Reader:
    mine: dict[str, Any] = {"tenant": "acme", "key": "abc", "max_tokens": 8}
    return Reader(gateway.generate(call(**(mine | asked))))


async def status_of(gateway: Gateway, **asked: Any) -> Status:
    with pytest.raises(Status) as refused:
        await reader(gateway, **asked).accepted()
    return refused.value


def fixed_clock(rig: Rig) -> None:
    """Stands in the middle of a minute: no window ends during a test."""
    made = rig.ports
    rig.ports = lambda name: replace(made(name), wall_ns=lambda: NOW_MS * 1_000_000)  # type: ignore[method-assign]


def test_two_gateways_let_in_as_many_at_once_as_the_key_may() -> None:
    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        keys = {"abc": key(concurrent_requests=2)}
        async with rig.standing(keys=keys) as (one, batcher), rig.gateway("gw2", keys=keys) as two:
            await until(lambda: two.ready)
            first, second = reader(one), reader(two)
            jobs = [await batcher.take(), await batcher.take()]
            for gateway in (one, two):
                status = await status_of(gateway)
                assert (status.code, status.retry_ms) == (Code.RESOURCE_EXHAUSTED, 1000)
                assert "concurrent_requests" in status.message
            # what was let in before is resumed, though no slot is free
            again = Reader(two.resume(await first.accepted(), (), "acme", None, "abc"))
            await again.accepted()
            await again.leave()
            for job in jobs:
                await batcher.end(job)
            await first.done()
            await second.done()
            third = reader(two)
            await batcher.end(await batcher.take())
            await third.done()

    run(main())


def test_tokens_are_counted_as_they_are_used() -> None:
    """And exceeded only by what runs: here by one request's output beyond its reservation."""

    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        long = OUTPUT_RESERVED + 200
        keys = {"abc": key(tokens_per_minute=1000)}
        async with rig.standing(keys=keys) as (one, batcher), rig.gateway("gw2", keys=keys) as two:
            await until(lambda: two.ready)
            ledger_subject = subjects.quota("abc")

            async def granted() -> int:
                stored = await rig.bus("reader").last(subjects.QUOTAS, ledger_subject)
                assert stored is not None
                return sum(w.granted for w in parse_ledger(stored.data).windows)

            refused = await status_of(one, prompt="p" * 1000, max_tokens=1)
            assert refused.retry_ms is None and "counts as 1001" in refused.message
            first = reader(one, prompt="p" * 700, max_tokens=long)  # 956 reserved, 1156 used
            job = await batcher.take()
            refused = await status_of(two, prompt="p" * 50, max_tokens=1)
            assert refused.retry_ms == MINUTE_MS - 5_000
            batcher.send(job, *(b"x"[0] for _ in range(long)))
            await batcher.end(job)
            await first.done()
            await until_async(lambda: granted(), 1156)
            assert first.finished is not None
            refused = await status_of(two, prompt="p", max_tokens=1)
            assert "tokens_per_minute" in refused.message

    run(main())


async def until_async(what: Any, least: int) -> None:
    async with asyncio.timeout(10):
        while await what() < least:  # noqa: ASYNC110 - a test watches from outside
            await asyncio.sleep(0.02)


def test_what_was_reserved_and_not_used_is_free_again() -> None:
    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        async with rig.standing(keys={"abc": key(tokens_per_minute=266 + 19 * 13)}) as (gateway, batcher):
            for _ in range(20):  # 266 reserved, 13 used
                one = reader(gateway, prompt="p" * 10, max_tokens=300)
                job = await batcher.take()
                batcher.send(job, 65, 66, 67)
                await batcher.end(job)
                await one.done()
            assert (await status_of(gateway, prompt="p" * 10, max_tokens=300)).retry_ms

    run(main())


def test_a_call_that_runs_nothing_counts_as_a_request() -> None:
    async def main() -> None:
        rig = Rig()
        fixed_clock(rig)
        async with rig.standing(keys={"abc": key(requests_per_minute=2)}) as (gateway, _):
            mine = call(tenant="acme", key="abc")
            await gateway.tokenize(mine)
            await gateway.tokenize(mine)
            with pytest.raises(Status, match="requests_per_minute"):
                await gateway.tokenize(mine)
            assert (await status_of(gateway)).code is Code.RESOURCE_EXHAUSTED
            await gateway.tokenize(call())  # ours are not asked

    run(main())
