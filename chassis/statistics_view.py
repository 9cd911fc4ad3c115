"""What a model's batchers answer when they are asked for their statistics."""

import asyncio
from dataclasses import dataclass, field

from chassis import subjects
from chassis.bus import Bus
from chassis.errors import BusError
from chassis.messages import BadMessage
from chassis.messages.registry import BatcherEntry, parse_batcher
from chassis.messages.statistics import ModelStatistics, parse_statistics

TIMEOUT_S = 5.0


@dataclass(slots=True)
class StatsShown:
    of_batchers: list[ModelStatistics] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)  # batchers that do not answer, and why


async def look(bus: Bus, model: str | None, timeout_s: float = TIMEOUT_S) -> StatsShown:
    """Every batcher that the registry knows, of one model or all; all are asked at once. Raises BusError."""
    shown = StatsShown()
    asked: list[BatcherEntry] = []
    for entry in await bus.entries(subjects.BATCHERS):
        try:
            batcher = parse_batcher(entry.value or b"")
        except BadMessage:
            continue  # anyone may write there
        if model is None or batcher.model == model:
            asked.append(batcher)
    async with asyncio.TaskGroup() as group:
        for batcher in asked:
            group.create_task(_ask(bus, batcher, shown, timeout_s))
    shown.of_batchers.sort(key=lambda its: (its.model, its.boot))
    return shown


async def _ask(bus: Bus, batcher: BatcherEntry, shown: StatsShown, timeout_s: float) -> None:
    try:
        answer = await bus.request(subjects.statistics(batcher.boot), b"", timeout_s)
        shown.of_batchers.append(parse_statistics(answer.data))
    except (BusError, BadMessage) as error:
        shown.silent.append(f"batcher {batcher.boot} of {batcher.model}: {error or 'no answer'}")
