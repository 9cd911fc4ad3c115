"""The counterexamples of section 5 of the ownership protocol, each step by hand.

Each way is walked twice: by the rules it ends well, by the broken rule an invariant falls. One that falls
by no rule shows what the broker must not do.
"""

import random
from collections.abc import Callable

import pytest

from batcher.ownership import State
from chassis.messages.request import Claim, Reason, Terminal
from tests.model import broken_rules as broken
from tests.model.world import Bad, R, Setting, World

Way = Callable[["Script"], None]


class Script:
    def __init__(self, setting: Setting) -> None:
        self.world = World(setting, random.Random(1))

    def go(self, *labels: str) -> None:
        """Each is the beginning of the label of something that may happen now."""
        for label in labels:
            actions = self.world.actions()
            found = [a for a in actions if a.label == label] or [
                a for a in actions if a.label.startswith(label)
            ]
            assert found, f"{label}: not among {[a.label for a in actions]}"
            self.world.apply(found[0])

    def until(self, done: Callable[[], bool], hold: tuple[str, ...] = ()) -> None:
        """Fair steps, the oldest first, but nothing whose label begins as one in `hold`."""
        for _ in range(600):
            if done():
                return
            fair = [a for a in self.world.fair() if not a.label.startswith(hold or ("-",))]
            assert fair, "nothing more happens"
            self.world.apply(fair[0])
        raise AssertionError(f"not reached: {self.world.items}")

    def state(self, name: str) -> State:
        return self.world.processes[name].core.state(R)

    def reach(self, name: str, state: State, hold: tuple[str, ...] = ()) -> None:
        self.until(lambda: self.state(name) is state, hold)

    def wait(self, seconds: float, hold: tuple[str, ...] = ()) -> None:
        end = self.world.now + seconds
        self.until(lambda: self.world.now >= end, hold)

    def terminal(self) -> Terminal:
        record = self.world.log[-1][1]
        assert isinstance(record, Terminal)
        return record


def cancelled_while_its_publish_was_lost(s: Script) -> None:
    """1: the first delivery would run what was cancelled."""
    s.go("publish > g unanswered", "published > g", "time passes")
    s.go("cancel read > g", "cancel read done > g", "cancel write > g")
    s.go("broker delivers to a", "a admits", "write > a")
    s.world.settle()
    assert s.terminal().reason is Reason.CANCELLED


def two_owners_of_one_first_delivery(s: Script) -> None:
    """2: A runs unclaimed, B too."""
    s.go("publish > g", "published > g", "broker delivers to a", "a admits", "a steps", "a stopped")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.reach("b", State.RUNNING, hold=("b steps",))
    s.go("b steps", "a wakes")
    s.world.settle()
    assert s.terminal().boot == s.world.processes["b"].boot


def sleeper_with_an_older_claim(s: Script) -> None:
    """3: A claims and sleeps before its question; B claims, asks and runs; A asks."""
    s.go("publish > g", "published > g", "broker delivers to b")
    s.reach("b", State.RUNNING, hold=("b steps",))
    s.go("b killed")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to a")
    s.reach("a", State.CLAIMING)
    s.go("write > a", "a stopped", "b restarts")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.reach("b", State.RUNNING, hold=("b steps",))
    s.go("b steps", "part > g", "a wakes")
    s.until(lambda: s.state("a") is not State.CLAIMING, hold=("b steps",))
    s.until(lambda: s.state("a") is not State.TAKEOVER, hold=("b steps", "broker"))
    s.world.settle()


def resumed_where_no_attempt_is_known(s: Script) -> None:
    """4: as 3, but the gateway that B passed its token to is dead, the client elsewhere."""
    s.go("publish > g", "published > g", "broker delivers to b")
    s.reach("b", State.RUNNING, hold=("b steps",))
    s.go("b killed")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to a")
    s.reach("a", State.CLAIMING)
    s.go("write > a", "a stopped", "b restarts")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.reach("b", State.RUNNING, hold=("b steps",))
    s.go("g dies", "client resumes", "gateway read > h", "gateway read done > h", "b stopped", "a wakes")
    s.go("write done > a", "takeover? > h", "takeover answer > a")
    s.until(lambda: s.state("a") not in (State.TAKEOVER, State.VERIFYING), hold=("attach", "broker", "b"))
    if s.state("a") is State.RUNNING:
        s.go("a steps", "part > h", "a stopped")
    s.go("b wakes")
    s.until(lambda: s.state("b") is State.NONE, hold=("attach", "gateway", "refused", "broker", "read > b"))
    s.world.settle()


def the_question_to_one_gateway(s: Script) -> None:
    """5: the client moved; B asks the dead gateway only and starts afresh."""
    s.go("publish > g", "published > g", "broker delivers to a")
    s.reach("a", State.RUNNING, hold=("a steps",))
    s.go("a steps", "part > g")
    while not s.world.client.ids:
        s.go("time passes")
    s.go("g dies", "client resumes")
    s.world.client.ids = s.world.gateways["h"].ids = s.world.gateways["g"].ids
    s.until(lambda: s.world.gateways["h"].state == "open", hold=("a steps",))
    s.go("a killed")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.until(lambda: len(s.world.log) == 3, hold=("attach", "part", "refused", "gateway read"))
    s.world.settle()


def retried_with_its_key(s: Script) -> None:
    """6: the publish timed out, was stored, and is tried again."""
    s.go("publish > g unanswered", "published > g", "client tries again", "publish > h", "published > h")
    s.until(lambda: s.world.gateways["h"].state == "open", hold=("cancel", "broker"))
    s.wait(1.5, hold=("broker",))
    s.world.settle()
    assert s.world.client.told is not None and s.world.client.told[0] == "stop"


def silence_at_takeover(s: Script) -> None:
    """7: answers are lost, the request is served."""
    s.go("publish > g", "published > g", "broker delivers to a")
    s.reach("a", State.RUNNING, hold=("a steps",))
    s.go("a killed")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.reach("b", State.TAKEOVER)
    lost = 0
    while lost < 4:
        if any(i.kind == "takeover?" for i in s.world.items):
            s.go("takeover? > " + next(i.to for i in s.world.items if i.kind == "takeover?") + " lost")
            lost += 1
        else:
            s.go("time passes")
    s.reach("b", State.RUNNING)
    s.wait(11, hold=("b steps", "gateway", "attach"))
    s.world.settle()


def resumed_while_the_old_gateway_counts(s: Script) -> None:
    """8: the client left one gateway and resumed at another."""
    s.go("publish > g", "published > g", "broker delivers to a")
    s.reach("a", State.RUNNING, hold=("a steps",))
    s.go("client leaves", "client resumes")
    s.until(lambda: s.world.gateways["h"].state == "open", hold=("a steps",))
    s.wait(4, hold=("a steps",))
    s.world.settle()
    assert s.terminal().reason is Reason.STOP


def an_old_part_after_the_question(s: Script) -> None:
    """A part of the dead owner arrives after the gateway answered the new one."""
    s.go("publish > g", "published > g", "broker delivers to a")
    s.reach("a", State.RUNNING, hold=("a steps",))
    s.go("a steps", "a killed")
    s.wait(1.2, hold=("broker delivers", "part"))
    s.go("broker delivers to b")
    s.until(lambda: isinstance(s.world.log[-1][1], Terminal), hold=("part", "finish"))
    s.go("part > g")
    s.world.settle()


def a_blind_takeover(s: Script) -> None:
    """No answer came, so the new owner makes other tokens than the gateway holds."""
    s.go("publish > g", "published > g", "broker delivers to a")
    s.reach("a", State.RUNNING, hold=("a steps",))
    s.go("a steps", "part > g", "a killed")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.until(lambda: s.state("b") is State.RUNNING, hold=("takeover", "b steps"))
    s.until(lambda: s.state("b") is not State.RUNNING, hold=("takeover", "refused"))
    s.world.settle()


def the_fenced_one(s: Script) -> None:
    """A sleeps, B takes over and dies; A must not hold the message against the next."""
    s.go("publish > g", "published > g", "broker delivers to a")
    s.reach("a", State.RUNNING, hold=("a steps",))
    s.go("a stopped")
    s.wait(1.2, hold=("broker delivers",))
    s.go("broker delivers to b")
    s.reach("b", State.TAKEOVER)
    s.go("a wakes")
    s.until(lambda: s.state("a") is State.NONE, hold=("broker",))
    s.go("b killed")
    s.world.settle()


PLAIN, WINDOW = Setting(tokens=3), Setting(tokens=3, window_s=3.0)
WAYS: list[tuple[Way, Setting, dict[str, object], str]] = [
    (cancelled_while_its_publish_was_lost, Setting(keyed=False), {"fence": False}, "S5"),
    (two_owners_of_one_first_delivery, PLAIN, {"core": broken.core(broken.SendsBeforeTheClaim)}, "a part"),
    (sleeper_with_an_older_claim, PLAIN, {"core": broken.core(broken.LiftsItsAttempt)}, "a part"),
    (resumed_where_no_attempt_is_known, PLAIN, {"gateway": broken.AttachesWithoutMinimum}, "S2"),
    (the_question_to_one_gateway, PLAIN, {"ask_all": False}, "S2"),
    (retried_with_its_key, PLAIN, {"gateway": broken.CancelsDespiteItsKey}, "S5"),
    (silence_at_takeover, PLAIN, {"core": broken.core(broken.TakesSilenceForACancel)}, "S5"),
    (silence_at_takeover, PLAIN, {"core": broken.core(broken.CountsWithoutAsking)}, "S5"),
    (resumed_while_the_old_gateway_counts, WINDOW, {"gateway": broken.CountsTheWindowItself}, "S5"),
    (an_old_part_after_the_question, PLAIN, {"gateway": broken.MinimumNotRaised}, "S2"),
    (a_blind_takeover, PLAIN, {"gateway": broken.NoDigest}, "S1"),
    (the_fenced_one, PLAIN, {"core": broken.FencedGoesOnAcking}, "S3"),
]


@pytest.mark.parametrize("way,setting,_,__", WAYS)
def test_by_the_rules_it_ends_well(way: Way, setting: Setting, _: object, __: object) -> None:
    way(Script(setting))


@pytest.mark.parametrize("way,setting,rule,falls", WAYS)
def test_by_the_broken_rule_an_invariant_falls(
    way: Way, setting: Setting, rule: dict[str, object], falls: str
) -> None:
    fields = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    with pytest.raises(Bad, match=falls):
        way(Script(Setting(**(fields | rule))))


@pytest.mark.parametrize("steps", range(40))
def test_who_drains_before_it_ends_is_never_counted_as_dead(steps: int) -> None:
    """After each step of the plain way, the claim's write and the takeover among them."""
    s = Script(Setting(tokens=3))
    for _ in range(steps):
        if not s.world.quiet():
            s.world.apply(s.world.fair()[0])
    s.go("a drains")
    s.until(lambda: s.state("a") is State.NONE)
    s.go("a killed")
    s.world.settle()
    claims = [record for _, record in s.world.log if isinstance(record, Claim)]
    assert claims and not any(c.batcher_deaths for c in claims)


def test_a_lost_tail_loses_a_request() -> None:
    """9: the record is lost, the acknowledgement kept. No rule helps: the broker must not."""
    s = Script(PLAIN)
    s.world.accepted = True
    s.go("publish > g", "published > g", "broker delivers to a")
    s.until(lambda: bool(s.world.log) and isinstance(s.world.log[-1][1], Terminal))
    s.until(lambda: s.world.message is None)
    s.world.power_cut()
    with pytest.raises(Bad, match="S3"):
        s.world.check()
