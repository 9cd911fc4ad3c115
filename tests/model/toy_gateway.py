"""A gateway as small as table 2.2 of the ownership protocol allows, and the one client that it serves.

It speaks to the world only through `post` (something in flight) and the world's log and message.
"""

from typing import TYPE_CHECKING

from chassis.messages.chunk import Finish, Part, extend_digest
from chassis.messages.request import (
    Cancel,
    Claim,
    Reason,
    Record,
    Terminal,
)

if TYPE_CHECKING:
    from tests.model.world import World

Ids = tuple[int, ...]


class Client:
    """`told`: what it was told at last, with the ids it holds then."""

    def __init__(self) -> None:
        self.at: str | None = "g"
        self.ids: Ids = ()
        self.told: tuple[str, Ids] | None = None


class ToyGateway:
    def __init__(self, name: str, world: "World") -> None:
        self.name, self.world = name, world
        self.state = "off"
        self.ids: Ids = ()
        self.minimum: tuple[int, str] = (0, "")
        self.heard_at = 0.0
        self.unanswered = False  # the owner it knows did not answer the last question
        self.cancel_at: float | None = None  # when the record is to be written
        self.missed = 0

    @property
    def serves(self) -> bool:
        return self.state == "open"

    @property
    def busy(self) -> bool:
        return self.state in ("publishing", "attaching", "open") or self.cancel_at is not None

    # ---- time --------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        times = []
        if self.state == "open":
            known = self.minimum[1] != ""
            times.append(self.heard_at + (1.0 if known or self.cancel_at is not None else 10.0))
            deadline = self.world.deadline
            if deadline is not None and self.cancel_at is None:
                times.append(deadline + 1.0)
        if self.cancel_at is not None:
            times.append(self.cancel_at)
        return min(times, default=None)

    def tick(self) -> None:
        now = self.world.now
        if self.cancel_at is not None and self.cancel_at <= now:
            self.cancel_at = now + 1.0
            self.world.post("cancel read", self.name)
        if self.state != "open":
            return
        deadline = self.world.deadline
        if deadline is not None and self.cancel_at is None and deadline + 1.0 <= now:
            self.world.deadline_cancel = True
            self.cancel()
        timer = self.next_timer()
        if timer is not None and timer <= now:
            self.heard_at = now
            if self.minimum[1] and not self.unanswered:
                self.unanswered = True
                self.attach(*self.minimum)
            else:
                self.world.post("gateway read", self.name)

    def attach(self, attempt: int, boot: str) -> None:
        self.world.post("attach", boot, self.name, attempt, self.ids)

    def attach_answered(self, kind: str) -> None:
        if kind == "attached":
            self.unanswered, self.heard_at = False, self.world.now
        elif kind == "unknown" and self.state == "open" and self.unanswered:
            self.world.post("gateway read", self.name)

    # ---- the client's side -------------------------------------------------------------------------

    def publish(self) -> None:
        self.state = "publishing"
        self.world.post("publish", self.name)

    def published(self, how: str) -> None:
        if self.state != "publishing":
            return
        if how == "stored":
            self._accept()
        elif how == "taken":
            self.world.accepted = True
            self.state = "attaching"
            self.world.post("gateway read", self.name)
        else:
            self.state = "closed"
            self.world.tell_client(self, "unavailable", ())
            if not self.world.keyed:
                self.world.gave_up = True
                self.cancel_at = self.world.now

    def _accept(self) -> None:
        self.world.accepted = True
        self.state, self.heard_at = "open", self.world.now

    def resume(self, ids: Ids) -> None:
        self.state, self.ids = "attaching", ids
        self.world.post("gateway read", self.name)

    def cancel(self) -> None:
        if self.cancel_at is None:
            self.cancel_at = self.world.now + 1.0
            for boot in [self.minimum[1]] if self.minimum[1] else self.world.boots():
                self.world.post("cancel ask", boot)

    def client_gone(self) -> None:
        if self.world.window_s > 0:
            for boot in [self.minimum[1]] if self.minimum[1] else self.world.boots():
                self.world.post("detached", boot, self.name)
        else:
            self.world.gave_up = True
            self.cancel()
        self.state = "closed"

    # ---- the log -----------------------------------------------------------------------------------

    def read_done(self, record: Record | None, message: bool) -> None:
        if self.state not in ("attaching", "open"):
            return
        if isinstance(record, Terminal):
            self._terminal(record)
        elif self.state == "open":
            if record is not None and record.boot:
                self.attach(record.attempt, record.boot)
                self.unanswered = False
        elif record is not None:
            self.minimum = max(self.minimum, (record.attempt, record.boot))
            self.state, self.heard_at = "open", self.world.now
            if record.boot:
                self.attach(record.attempt, record.boot)
        elif message:
            self.state, self.heard_at = "open", self.world.now
        else:
            self.missed += 1
            if self.missed < 2:
                self.world.post("gateway read", self.name)
            else:
                self.state = "closed"
                self.world.tell_client(self, "not found", self.ids)

    def cancel_read_done(self, record: Record | None, seq: int) -> None:
        if self.cancel_at is None:
            return
        if isinstance(record, Terminal | Cancel):
            self.cancel_at = None
        else:
            cancel = Cancel(record.attempt, record.boot) if isinstance(record, Claim) else Cancel(0, "")  # type: ignore[arg-type]
            self.world.post("cancel write", self.name, cancel, seq)

    def _terminal(self, record: Terminal) -> None:
        held, ids = self.ids, record.output_ids
        if ids[: len(held)] == held:
            self._pass_on(ids[len(held) :])
            self._close(record.reason.value)
        elif record.reason is not Reason.STOP and held[: len(ids)] == ids:
            self._close(record.reason.value)
        else:
            self._close("diverged")

    # ---- the owner's side --------------------------------------------------------------------------

    def _below(self, attempt: int, boot: str) -> bool:
        least, by = self.minimum
        return attempt < least or (attempt == least and by not in ("", boot))

    def _proof(self) -> bool:
        """Parts and questions prove that the request was stored."""
        if self.state == "publishing" and not self.world.keyed:
            self._accept()
        return self.state == "open"

    def part(self, boot: str, part: Part) -> None:
        if self.state == "closed":
            self.world.post("refused", boot, self.name, part.attempt, None, None)
        if not self._proof():
            return
        if self._below(part.attempt, boot):
            self.world.post("refused", boot, self.name, part.attempt, self.minimum[0], None)
            return
        self.minimum = (part.attempt, boot)
        self.heard_at, self.unanswered = self.world.now, False
        held, end = self.ids, part.first_index + len(part.ids)
        if part.first_index > len(held):
            self.attach(*self.minimum)  # a gap
            return
        whole = held[:end] + part.ids[len(held[:end]) - part.first_index :]
        if extend_digest(0, whole) != part.digest:
            self.world.post("refused", boot, self.name, part.attempt, None, held)
        else:
            self._pass_on(whole[len(held) :])

    def takeover_asked(self, attempt: int, boot: str) -> None:
        if not self._proof():
            return
        if self._below(attempt, boot):
            self.world.post("takeover answer", boot, self.name, attempt, None, self.minimum[0])
        else:
            self.minimum = (attempt, boot)
            self.heard_at, self.unanswered = self.world.now, False
            self.world.post("takeover answer", boot, self.name, attempt, self.ids, None)

    def finish(self, finish: Finish) -> None:
        if self.state == "open" and finish.length == len(self.ids):
            if finish.digest == extend_digest(0, self.ids):
                self._close(finish.reason.value)

    def _pass_on(self, ids: Ids) -> None:
        self.ids += ids
        if self.world.client.at == self.name:
            self.world.client.ids += ids

    def _close(self, told: str) -> None:
        self.state, self.cancel_at = "closed", None
        self.world.tell_client(self, told, self.ids)
