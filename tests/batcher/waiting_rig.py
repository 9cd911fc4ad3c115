"""Sequences that only wait."""

from batcher.queueing import Place, Queueing
from batcher.sequence import Sequence, Status
from batcher.waiting import WaitingRoom
from chassis.ids import RequestId
from chassis.messages.request import Limits
from tests.batcher.toy_pipeline import make_request, make_sequence


class Rig:
    def __init__(self, **knobs: object) -> None:
        self.queueing = Queueing(**knobs)  # type: ignore[arg-type]
        self.room = WaitingRoom(self.queueing)
        self.came = 0

    def make(
        self,
        name: str,
        priority: int = 5,
        tenant: str = "t",
        charge: int = 10,
        due: float = 1e9,
        claimed: bool = False,
    ) -> Sequence:
        self.came += 1
        batch = self.queueing.is_batch(priority)
        sequence = make_sequence(name, order=((1 << 60) if batch else priority, self.came))
        sequence.request = make_request(name, [1, 2], Limits(8), priority, tenant)
        sequence.place = Place(self.queueing.level(priority), batch, due, float(self.came), charge)
        sequence.claimed = claimed
        return sequence

    def add(self, name: str, **what: object) -> Sequence:
        sequence = self.make(name, **what)  # type: ignore[arg-type]
        self.room.add(sequence)
        self.room.check()
        return sequence

    def names(self, count: int = 100) -> list[RequestId]:
        return [sequence.request.id for sequence in self.room.first(count)]

    def take(self) -> Sequence:
        head = self.room.head
        assert head is not None
        self.room.took(head)
        head.status = Status.RUNNING
        self.room.check()
        return head

    def take_all(self) -> list[RequestId]:
        names = []
        while len(self.room):
            names.append(self.take().request.id)
        return names
