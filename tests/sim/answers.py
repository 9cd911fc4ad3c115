"""What clients were told, against the oracle and the logs: ids, text, and why each stream ended."""

from chassis import subjects
from chassis.messages.request import Reason, Record, Terminal
from tests.sim.checkers import read_logs
from tests.sim.clients import GONE, POISON_ID, Outcome, expected, is_poisoned, read_out
from tests.sim.queue_knobs import draw_knobs
from tests.sim.world import World

ATTACH_S = 0.3  # within which a gateway and an owner find each other
LOSSY_ATTACH_S = 3.0
COUNT_MIN_S = 10.0  # of a request whose client did not say that it left
DEATHS = 3  # of workers and batchers, that fail a request


def check_answers(world: World, outcomes: list[Outcome]) -> None:
    logs = read_logs(world)
    by_key: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_key.setdefault(outcome.plan.call.client_key or outcome.plan.name, []).append(outcome)
    for group in by_key.values():
        for outcome in group:
            wrong = _Answer(world, outcome, group, logs).judge()
            world.failures += [f"{outcome.plan.name} ({outcome.request_id}): {what}" for what in wrong]
        served = any("diverged" in o.message for o in group)  # and was told that it had something else
        if len(group) > 1 and not served and all(o.reason in ("ABORTED", "ALREADY_EXISTS") for o in group):
            world.fail(f"{group[0].plan.name}: nobody was served")


class _Answer:
    def __init__(
        self,
        world: World,
        outcome: Outcome,
        group: list[Outcome],
        logs: dict[str, list[tuple[float, Record]]],
    ) -> None:
        self.world = world
        self.outcome = outcome
        self.group = group
        name = outcome.request_id
        self.log = logs.get(subjects.result(name), []) if name is not None else []
        self.wrong: list[str] = []

    def demand(self, ok: bool, what: str) -> None:
        if not ok:
            self.wrong.append(what)

    def judge(self) -> list[str]:
        """What is wrong, if anything."""
        outcome, plan = self.outcome, self.outcome.plan
        ids, text, reason = self._expected()
        rival = plan.rivals > 0
        self.demand(outcome.ids == ids[: len(outcome.ids)], f"ids {outcome.ids} are no prefix of {ids}")
        match outcome.reason:
            case "STOP" | "LENGTH":
                self.demand(outcome.ids == ids, f"whole ids {outcome.ids}, expected {ids}")
                self.demand(outcome.text == text, f"text {outcome.text!r}, expected {text!r}")
                self.demand(outcome.reason == reason.name, f"reason {outcome.reason}, expected {reason.name}")
                self.demand(POISON_ID not in (plan.call.token_ids or ()), "a poisoned request has an answer")
            case "CANCELLED":
                self.demand(self._may_be_cancelled(), "cancelled, but nobody cancelled")
            case "DEADLINE" | "DEADLINE_EXCEEDED":
                self.demand(plan.call.timeout_ms > 0, "late, but it had no deadline")
            case "UNAVAILABLE":
                lost = not plan.call.client_key and outcome.request_id is None
                self.demand(lost or self._may_be_refused(), f"given up: {outcome.message}")
            case "INTERNAL" | "FAILED":
                self.demand(self._may_fail(), "failed without a cause")
            case "ABORTED" if "another call" in outcome.message:
                self.demand(rival, outcome.message)
            case "ABORTED":
                self.demand(self._may_diverge(), outcome.message)
            case "ALREADY_EXISTS":
                others = [o.plan.call for o in self.group if o.plan.call != plan.call]
                self.demand(bool(others), "refused, but nobody else used its key")
            case _ if outcome.reason != GONE:
                self.demand(False, f"ended as {outcome.reason!r}: {outcome.message}")
        if outcome.request_id is not None and not rival:
            self._compare_with_record()
        return self.wrong

    def _expected(self) -> tuple[list[int], str, Reason]:
        """By the oracle; where every machine has its own numerics the record alone knows the ids."""
        call, last = self.outcome.plan.call, self.log[-1][1] if self.log else None
        if not self.world.options.wobbly:
            return expected(call)
        if not isinstance(last, Terminal) or self._followed_nothing():
            return read_out(call, self.outcome.ids)
        whole = last.reason in (Reason.STOP, Reason.LENGTH)
        return read_out(call, last.output_ids if whole else self.outcome.ids)

    def _followed_nothing(self) -> bool:
        """What it holds bound nobody: told that it diverged, or gone, with machines that differ."""
        gone = self.outcome.reason == GONE and self.world.options.wobbly
        return gone or self.outcome.reason == "ABORTED"

    def _may_be_refused(self) -> bool:
        """By the queue, and its record says why."""
        options, last = self.world.options, self.log[-1][1] if self.log else None
        refused = isinstance(last, Terminal) and last.reason is Reason.REFUSED and bool(last.error)
        return refused and draw_knobs(options.seed, options.waiting_len_max).refuses

    def _may_diverge(self) -> bool:
        """Other numerics, and a takeover question that had no answer."""
        return self.world.options.wobbly and bool(self.world.troubles or self.world.options.core_loss)

    def _compare_with_record(self) -> None:
        outcome, last = self.outcome, self.log[-1][1] if self.log else None
        if not isinstance(last, Terminal):
            self.demand(False, f"accepted, but no terminal record: {last}")
        elif outcome.finished:
            same = last.reason.name == outcome.reason
            self.demand(same, f"told {outcome.reason}, the record says {last.reason.name}")
            if last.reason in (Reason.STOP, Reason.LENGTH):
                self.demand(list(last.output_ids) == outcome.ids, "the record holds other ids")
        else:
            held = tuple(outcome.ids[: len(last.output_ids)])
            if self._followed_nothing():
                return
            self.demand(held == last.output_ids[: len(held)], "the record contradicts what was told")

    def _may_be_cancelled(self) -> bool:
        """A wish, or nobody followed it for its whole window as far as its owner could know."""
        if any(o.cancelled or self._left_for_good(o) for o in self.group):
            return True
        if not self.log:
            return False
        ended_at, window_s = self.log[-1][0], float(self.outcome.plan.call.resume_window_s)
        if all(o.plan.leave_after is None for o in self.group):
            window_s = max(window_s, COUNT_MIN_S)
        return ended_at - self._last_heard(ended_at) >= window_s - 0.1

    def _left_for_good(self, outcome: Outcome) -> bool:
        plan = outcome.plan
        return outcome.left and (plan.call.resume_window_s == 0)

    def _last_heard(self, ended_at: float) -> float:
        """The last moment before the end at which a client was served by a gateway, all being well."""
        last, options = 0.0, self.world.options
        lossy = options.core_loss or options.call_loss or options.answer_loss or options.stale_read
        attach_s = LOSSY_ATTACH_S if lossy else ATTACH_S
        for outcome in self.group:
            for since, until in outcome.heard:
                at = min(until, ended_at)
                for began, ended in reversed(self.world.troubles):
                    if began <= at <= ended + LOSSY_ATTACH_S:
                        at = began
                if at >= since + attach_s or until < ended_at:
                    last = max(last, at)
        return last

    def _may_fail(self) -> bool:
        """Its own poison; or as many deaths as it takes, of which poison in its company may be two."""
        if any(is_poisoned(o.plan.call) for o in self.group):
            return True
        company = self.world.options.wobbly or any(is_poisoned(call) for call in self.world.calls)
        return self.world.num_deaths >= (0 if self.world.options.wobbly else 1 if company else DEATHS)
