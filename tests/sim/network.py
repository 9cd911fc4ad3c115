"""The three networks under one seeded chance: the broker's habits, rpc's, and the ring's delays."""

import random

from chassis.habits import Fate, Habits, Restart, Settle
from tests.sim.options import Options


class SimHabits(Habits):
    """Bad while `calm` is False; a perfect broker with delays after that."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(f"broker {options.seed}")
        self.calm = False

    def delay(self) -> float:
        return self.rng.random() * self.options.delay_s

    def unlucky(self, chance: float) -> bool:
        return not self.calm and chance > 0 and self.rng.random() < chance

    def core_delay_s(self, sender: str, receiver: str, subject: str) -> float | None:
        return None if self.unlucky(self.options.core_loss) else self.delay()

    def call(self, sender: str, what: str, subject: str) -> Fate:
        there, back = self.delay(), self.delay()
        if what in ("subscribe", "watch", "ensure"):
            return Fate(there, back)
        if self.unlucky(self.options.call_loss):
            return Fate(None, None)
        if what == "append":
            if self.unlucky(self.options.answer_loss):
                return Fate(there, None)
            if self.unlucky(self.options.late_write):
                return Fate(2.0 + 2.0 * self.rng.random(), back)
        return Fate(there, back)

    def settle_delay_s(self, sender: str, kind: Settle, subject: str) -> float | None:
        return None if self.unlucky(self.options.settle_loss) else self.delay()

    def honours(self, kind: Settle, subject: str, newest: bool) -> bool:
        return newest or self.calm or self.options.honours_old

    def ack_wait_s(self, consumer: str, subject: str, ack_wait_s: float) -> float:
        return 0.05 if self.unlucky(self.options.early_redelivery) else ack_wait_s

    def count(self, subject: str, count: int) -> int:
        return 1 if self.unlucky(self.options.early_redelivery) else count

    def records_behind(self, sender: str, subject: str) -> int:
        return 1 if self.unlucky(self.options.stale_read) else 0

    def watch_delay_s(self, receiver: str, key: str) -> float:
        return self.delay()

    def restart(self) -> Restart:
        one, two, three = (self.rng.random() < 0.5 for _ in range(3))
        return Restart(redelivers_all=one, forgets_counts=two, forgets_ids=three)

    def cut_notice_s(self, name: str) -> float:
        return self.rng.choice((0.5, 4.0))

    def survives_cut(self, name: str) -> bool:
        return self.rng.random() < 0.5
