"""The order of the waiting room: priority, tenants' shares, deadline, age; and what bounds a wait."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.queueing import BATCH
from batcher.sequence import Sequence, Status
from tests.batcher.waiting_rig import Rig

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60)


def test_priority_then_deadline_then_age() -> None:
    rig = Rig()
    rig.add("first")
    rig.add("second")
    rig.add("due", due=5.0)
    rig.add("urgent", priority=0)
    rig.add("low", priority=8)
    rig.add("owned", priority=8, claimed=True)
    assert rig.take_all() == ["owned", "urgent", "due", "first", "second", "low"]


def test_the_batch_class_comes_last_with_its_claims_in_front() -> None:
    rig = Rig()
    rig.add("batch", priority=BATCH)
    rig.add("batch that ran", priority=BATCH, claimed=True)
    rig.add("low", priority=8)
    assert rig.names() == ["low", "batch that ran", "batch"]
    head = rig.room.head
    assert head is not None and not rig.room.gives_way(head)
    rig.take()
    head = rig.room.head
    assert head is not None and rig.room.gives_way(head)


def test_tenants_take_turns_by_work() -> None:
    rig = Rig()
    for number in range(6):
        rig.add(f"a{number}", tenant="a", charge=10)
    for number in range(3):
        rig.add(f"b{number}", tenant="b", charge=20)
    assert rig.take_all() == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]


def test_a_weight_is_a_share() -> None:
    rig = Rig(tenant_weights={"a": 3.0})
    for number in range(60):
        rig.add(f"a{number}", tenant="a")
        rig.add(f"b{number}", tenant="b")
    taken = Counter(rig.take().request.tenant for _ in range(40))
    assert taken["a"] == pytest.approx(30, abs=1)


def test_who_begins_to_wait_has_saved_nothing_up() -> None:
    rig = Rig()
    for number in range(20):
        rig.add(f"a{number}", tenant="a")
    for _ in range(10):
        rig.take()
    for number in range(10):
        rig.add(f"b{number}", tenant="b")
    taken = Counter(rig.take().request.tenant for _ in range(10))
    assert taken["a"] == taken["b"] == 5


def test_what_a_request_really_took_is_settled() -> None:
    rig = Rig()
    for number in range(4):
        rig.add(f"a{number}", tenant="a", charge=10)
        rig.add(f"b{number}", tenant="b", charge=10)
    first = rig.take()
    assert first.request.id == "a0"
    rig.room.settle(first, 30)  # three times as much
    rig.room.settle(first, 500)  # once is enough
    rig.room.check()
    assert rig.take_all() == ["b0", "b1", "b2", "a1", "b3", "a2", "a3"]


def test_the_delayed_wait_behind_their_priority_only() -> None:
    rig = Rig()
    late = rig.add("late")
    rig.add("in time")
    rig.add("low", priority=7)
    rig.room.delay(late)
    rig.room.check()
    rig.add("came later")
    assert rig.names() == ["in time", "came later", "late", "low"]
    gone = rig.make("x")
    rig.room.add(gone)
    rig.room.delay(gone)
    rig.room.remove(gone)
    gone.status = Status.ENDED
    rig.room.check()
    assert rig.take_all() == ["in time", "came later", "late", "low"]


def test_a_turn_of_the_batch_class_is_as_good_as_any_other() -> None:
    rig = Rig(overtakes_max=1)
    batch = rig.add("batch", priority=BATCH)
    for number in range(BATCH + 1):
        rig.add(f"u{number}", priority=0)
    for _ in range(BATCH):
        assert rig.room.gives_way(batch)
        rig.take()
    assert rig.room.head is batch and not rig.room.gives_way(batch)
    assert rig.room.took(batch)


def draw(rig: Rig, dice: Random, number: int) -> Sequence:
    return rig.add(
        f"r{number}",
        priority=dice.choice([0, 3, 5, 5, 9]),
        tenant=dice.choice("abc"),
        charge=dice.randint(1, 40),
        due=float(number + dice.choice([5, 50])),
        claimed=dice.random() < 0.1,
    )


@SETTINGS
@given(st.integers(0, 2**32 - 1))
def test_whoever_comes_and_goes_the_order_is_one(seed: int) -> None:
    """The first few are who would be taken next, one after another."""
    dice = Random(seed)
    rig = Rig(tenant_weights={"a": 2.0, "b": 0.5}, overtakes_max=dice.choice([1, 3, 16]))
    there: dict[str, Sequence] = {}
    for number in range(120):
        act = dice.random()
        if act < 0.5:
            sequence = draw(rig, dice, number)
            there[sequence.request.id] = sequence
        elif act < 0.75 and there:
            gone = there.pop(dice.choice(list(there)))
            if dice.random() < 0.3 and not gone.claimed and not gone.place.delayed:
                rig.room.delay(gone)
            rig.room.remove(gone)
            gone.status = Status.ENDED
        elif there:
            assert rig.names(1) == rig.names(3)[:1]
            taken = rig.take()
            del there[taken.request.id]
            if dice.random() < 0.5:
                rig.room.settle(taken, dice.randint(0, 80))
        rig.room.check()
        assert sorted(rig.names(len(there))) == sorted(there)
    assert sorted(rig.take_all()) == sorted(there)


@SETTINGS
@given(
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0, 7.0])),
)
def test_tenants_that_both_wait_are_given_the_same_but_for_a_request_of_each(
    seed: int, weights: dict[str, float]
) -> None:
    dice = Random(seed)
    rig = Rig(tenant_weights=weights)
    charges: dict[str, list[int]] = {tenant: [dice.randint(1, 100) for _ in range(60)] for tenant in "abc"}
    for tenant, its in charges.items():
        for number, charge in enumerate(its):
            rig.add(f"{tenant}{number}", tenant=tenant, charge=charge)
    given = dict.fromkeys("abc", 0.0)
    left = dict.fromkeys("abc", 60)
    while all(left.values()):
        taken = rig.take()
        tenant = taken.request.tenant
        left[tenant] -= 1
        given[tenant] += taken.place.charge / weights.get(tenant, 1.0)
        largest = {name: max(its) / weights.get(name, 1.0) for name, its in charges.items()}
        for one in "abc":
            for other in "abc":
                assert abs(given[one] - given[other]) <= largest[one] + largest[other] + 1e-6


@SETTINGS
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 16]), st.integers(1, 9))
def test_a_priority_that_waits_is_passed_so_often_at_most(seed: int, overtakes: int, low: int) -> None:
    """A mixture of higher priorities comes faster than they are taken: each passes for 1/(q - p)."""
    dice = Random(seed)
    rig = Rig(overtakes_max=overtakes)
    low_one = rig.add("low", priority=low)
    highs = [dice.randrange(low) for _ in range(dice.randint(1, 3))]
    passed = 0.0
    for number in range(overtakes * 10 + 2):
        for priority in highs:
            rig.add(f"h{number}-{priority}-{rig.came}", priority=priority, tenant=dice.choice("ab"))
        taken = rig.take()
        if taken is low_one:
            return
        passed += 1 / (low - taken.place.level)
        assert passed <= overtakes + len(set(highs)) - 1 + 1e-9  # the last one, and turns of the others
    raise AssertionError("it starves")


@SETTINGS
@given(st.integers(0, 2**32 - 1))
def test_of_one_tenant_nobody_is_passed_by_one_that_comes_a_patience_later(seed: int) -> None:
    dice = Random(seed)
    patience = 20.0
    rig = Rig()
    came: dict[str, float] = {}
    taken: list[str] = []
    for number in range(100):
        now = float(number)
        deadline = now + dice.uniform(0.1, 100.0) if dice.random() < 0.5 else 1e9
        name = f"r{number}"
        came[name] = now
        rig.add(name, due=min(deadline, now + patience))
        if dice.random() < 0.7:
            taken.append(rig.take().request.id)
    taken += rig.take_all()
    for place, name in enumerate(taken):
        assert all(came[earlier] < came[name] + patience for earlier in taken[:place])


def test_work_ahead_is_what_is_given_before() -> None:
    rig = Rig()
    rig.add("higher", priority=3, charge=100)
    rig.add("owned", claimed=True, charge=7)
    for number in range(4):
        rig.add(f"mine{number}", tenant="a", charge=10, due=float(number))
        rig.add(f"other{number}", tenant="b", charge=50)
    rig.add("lower", priority=6, charge=1000)
    ahead = rig.room.work_ahead(rig.make("new", tenant="a", due=2.5))
    assert ahead == 100 + 7 + 30 + 30  # as much of the other's as its share is meanwhile
    assert rig.room.work_ahead(rig.make("alone", tenant="c")) == 107
