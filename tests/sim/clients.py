"""Applications of a seed: they ask, cancel, go away, come back, and know what the answer must be.

The expected text comes from the fake model's oracle, cut by a plain reading of the rules of stops, and
from nothing that the services compute.
"""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field

from chassis.errors import Code, Status
from chassis.ids import RequestId
from chassis.messages.request import Reason
from gateway.service import Accepted, Delta, Finished, GenerateCall
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES, oracle
from tests.sim.world import Node, World

POISON_ID = 300
NUM_LAYERS = 4
RETRIES_MAX = 400
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    start_s: float
    call: GenerateCall
    cancel_after: int | None  # tokens; then it cancels
    leave_after: int | None  # tokens; then it hangs up and resumes after `away_s`
    away_s: float
    poison: bool


@dataclass(slots=True)
class Outcome:
    plan: Plan
    request_id: RequestId | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""  # of Finished, or the name of the status
    finished: bool = False
    cancelled: bool = False
    lost_at: float | None = None  # since when nobody serves it


def expected(call: GenerateCall) -> tuple[list[int], str, Reason]:
    """Ids, text and reason of the whole answer, by a plain reading of the rules."""
    assert call.token_ids is not None and call.max_tokens is not None
    made = oracle(call.token_ids, call.seed or 0, call.temperature or 0.0, call.max_tokens, NUM_LAYERS)
    stops = [s.encode() for s in call.stop]
    ids: list[int] = []
    text = b""
    for token in made:
        ids.append(token)
        if token == EOS_ID and not call.ignore_eos:
            return ids, text.decode("utf-8", "replace"), Reason.STOP
        text += TOKEN_BYTES[token]
        found = [(text.find(s) + len(s), i) for i, s in enumerate(stops) if s in text]
        if found:
            end, which = min(found)
            return ids, text[: end - len(stops[which])].decode("utf-8", "replace"), Reason.STOP
    return ids, text.decode("utf-8", "replace"), Reason.LENGTH


def draw_plans(world: World) -> list[Plan]:
    options = world.options
    rng = random.Random(f"clients {options.seed}")
    prefix = tuple(rng.randrange(256) for _ in range(rng.randint(1, 8)))
    plans = []
    for i in range(options.num_clients):
        prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, options.prompt_len_max)))
        if options.shared_prefix and rng.random() < 0.7:
            prompt = prefix + prompt
        poison = "poison" in options.faults and i == 0
        if poison:
            prompt = (*prompt, POISON_ID)
        leaves = rng.random() < options.leave
        output_len = rng.randint(1, options.output_len_max)
        plans.append(
            Plan(
                name=f"c{i}",
                start_s=rng.choice((0.0, rng.uniform(0, options.fault_time_s))),
                call=GenerateCall(
                    tenant="t",
                    token_ids=prompt,
                    temperature=rng.choice((0.0, 1.0)),
                    seed=rng.getrandbits(63),
                    max_tokens=output_len,
                    stop=rng.choice(((), (), ("e",), ("at", " s"))),
                    ignore_eos=rng.random() < 0.3,
                    priority=rng.choice((0, 5, 5, 9)),
                    timeout_ms=rng.choice((200, 2000)) if rng.random() < options.deadline else 0,
                    resume_window_s=20 if leaves else 0,
                    client_key=f"key{i}" if leaves or rng.random() < options.keyed else "",
                ),
                cancel_after=rng.randrange(output_len) if rng.random() < options.cancel else None,
                leave_after=rng.randrange(output_len) if leaves else None,
                away_s=rng.choice((0.0, 0.5, 5.0)),
                poison=poison,
            )
        )
    return plans


class SimClient:
    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.outcome = Outcome(plan)
        self._rng = random.Random(f"client {world.options.seed} {plan.name}")
        self._left = False  # it is away
        self._has_left = False

    async def run(self) -> None:
        plan, outcome = self.outcome.plan, self.outcome
        await asyncio.sleep(plan.start_s)
        for _ in range(RETRIES_MAX):
            node = await self._gateway()
            try:
                await self._listen(node)
            except Status as status:
                if not self._again(status):
                    outcome.reason = status.code.name
                    self.world.note(f"{plan.name} ends: {status.code.name} {status.message}")
                    return
            if outcome.finished:
                self.world.note(f"{plan.name} ends: {outcome.reason} {outcome.request_id}")
                return
            away_s = RETRY_S
            if self._left and plan.away_s:
                away_s, self._left = plan.away_s, False
            await asyncio.sleep(away_s)
        self.world.fail(f"{plan.name} never came to an end")

    async def _gateway(self) -> Node:
        """Any that is up."""
        while True:
            up = [n for name, n in self.world.nodes.items() if name.startswith("gateway") and n.up]
            if up:
                return self._rng.choice(up)
            await asyncio.sleep(0.05)

    async def _listen(self, node: Node) -> None:
        plan, outcome = self.outcome.plan, self.outcome
        gateway = node.service
        if outcome.request_id is None:
            stream = gateway.generate(plan.call)
        else:
            stream = gateway.resume(outcome.request_id, tuple(outcome.ids), plan.call.tenant)
        async with aclosing(stream) as events:
            async for event in events:
                match event:
                    case Accepted(request_id=request_id):
                        if outcome.request_id not in (None, request_id):
                            self.world.fail(f"{plan.name}: another id on resume")
                        outcome.request_id = request_id
                        self.world.note(f"{plan.name} accepted {request_id} at {node.name}")
                    case Delta():
                        self._delta(event)
                    case Finished():
                        outcome.reason, outcome.finished = event.reason.name, True
                        return
                if self._wants_to_leave():
                    self.world.note(f"{plan.name} hangs up with {len(outcome.ids)}")
                    self._left = True
                    return
                await self._maybe_cancel(node)

    def _delta(self, delta: Delta) -> None:
        outcome = self.outcome
        if delta.ids and delta.first_index != len(outcome.ids):
            self.world.fail(f"{outcome.plan.name}: index {delta.first_index} after {len(outcome.ids)} ids")
        outcome.ids.extend(delta.ids)
        outcome.text += delta.text

    def _wants_to_leave(self) -> bool:
        """Once."""
        plan = self.outcome.plan
        if plan.leave_after is None or self._has_left or len(self.outcome.ids) < plan.leave_after:
            return False
        self._has_left = True
        return True

    async def _maybe_cancel(self, node: Node) -> None:
        plan, outcome = self.outcome.plan, self.outcome
        if plan.cancel_after is None or outcome.cancelled or len(outcome.ids) < plan.cancel_after:
            return
        outcome.cancelled = True
        assert outcome.request_id is not None
        self.world.note(f"{plan.name} cancels")
        try:
            await node.service.cancel(outcome.request_id, plan.call.tenant)
        except Status as status:
            self.world.note(f"{plan.name} cancel: {status.code.name}")

    def _again(self, status: Status) -> bool:
        """What a well-behaved client does: it tries again what is safe to try again."""
        known = self.outcome.request_id is not None or bool(self.outcome.plan.call.client_key)
        starting = "none is served" in status.message or "not running" in status.message
        return status.code is Code.UNAVAILABLE and (known or starting)
