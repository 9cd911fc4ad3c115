"""Pure. What other batchers of the model have to do with a request held here: who owns it, and who takes it.

These are rows of table 2.1 of the ownership protocol.
"""

from dataclasses import dataclass

from batcher import events as e
from batcher.actions import Actions
from batcher.holding import State, end_of
from chassis.ids import BootId
from chassis.messages.request import Cancel

OWNING = (State.TAKEOVER, State.RUNNING, State.VERIFYING, State.WRITING, State.FINISHING)


@dataclass(slots=True)
class Neighbours(Actions):
    def on_owner_answered(self, event: e.OwnerAnswered) -> None:
        if self.call != event.call:
            self.turn.drop("owner_answer")
        elif event.mine:
            self.leave("owned elsewhere")
        else:
            self._owner_silent(event.answered)

    def _owner_silent(self, answered: bool) -> None:
        """`answered`: a living batcher let go of it. Otherwise it left, or may have died of this request."""
        named, self.named = self.named, None
        assert named is not None
        if isinstance(named, Cancel):
            self.why = end_of(named)
            self._write_terminal()
            return
        self.worker_deaths = self.worker_deaths_claimed = named.worker_deaths
        self.batcher_deaths = named.batcher_deaths + (not answered and not named.left)
        if self.deaths >= self.turn.config.deaths_failed:
            self._condemn()
            self._write_terminal()
        else:
            self._claim()

    def on_owner_asked(self, event: e.OwnerAsked, alive: bool) -> None:
        mine = alive and self.state in OWNING and self.attempt == event.attempt
        self.turn.out.append(e.AnswerOwner(event.reply, mine))
        if mine:
            self.token = event.token
            if event.cancelled and self.state not in (State.WRITING, State.FINISHING):
                self._read(State.VERIFYING)
        elif not alive:
            self.leave("pipeline dead")

    def on_give_away(self, boot: BootId) -> None:
        """Until the other one takes it, it waits here."""
        if self.state is not State.WAITING or self.given:
            self.turn.drop("give_away")
            return
        age_s = self.age_s + self.turn.now - self.delivered_at
        self.turn.out.append(e.Give(self.request, boot, self.token, age_s))

    def on_take_answered(self, taken: bool) -> None:
        """What was claimed meanwhile stays: of two that hold it, the first to claim has it."""
        if taken and self.state is State.WAITING:
            self.leave("given away")
        else:
            self.turn.drop("take_answer")
