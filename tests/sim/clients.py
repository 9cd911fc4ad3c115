"""Applications of a seed: they ask, cancel, go away, come back, and know what the answer must be.

The expected text comes from the fake model's oracle, cut by a plain reading of the rules of stops, and
from nothing that the services compute.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from chassis.errors import Code, Status
from chassis.ids import RequestId
from chassis.messages.gateway import (
    Accepted,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    IdLogprobs,
    PromptLogprobs,
)
from chassis.messages.request import Reason
from chassis.messages.sampling import UNTOLD, TokenLogprobs
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES, logprobs_of, oracle, prompt_oracle
from tests.sim.grammars import choices_under, draw_grammar
from tests.sim.options import NUM_LAYERS as NUM_LAYERS
from tests.sim.queue_knobs import draw_knobs, tenant_of
from tests.sim.world import Node, World

POISON_ID = 300  # now and then the model says it itself
GONE = "GONE"
RETRIES_MAX = 400
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    start_s: float
    call: GenerateCall
    cancel_after: int | None  # tokens; then it cancels
    leave_after: int | None  # tokens; then it hangs up
    away_s: float | None  # for how long; None: it never comes back
    rivals: int = 0  # others who use its key: for the same request, or for another


@dataclass(slots=True)
class Outcome:
    plan: Plan
    request_id: RequestId | None = None
    ids: list[int] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)  # what the last stream told of it
    text: str = ""
    reason: str = ""  # of Finished, or the name of the status
    message: str = ""  # of the status
    finished: bool = False
    cancelled: bool = False
    left: bool = False
    heard: list[tuple[float, float]] = field(default_factory=list)  # when a gateway served it


def expected(call: GenerateCall) -> tuple[list[int], str, Reason]:
    """Ids, text and reason of the whole answer, by the oracle and a plain reading of the rules."""
    assert call.token_ids is not None and call.max_tokens is not None
    made = oracle(
        call.token_ids,
        call.seed or 0,
        call.temperature or 0.0,
        call.max_tokens,
        NUM_LAYERS,
        call.repetition_penalty is not None,
        **({} if call.grammar is None else {"choices_of": choices_under(call.grammar)}),
    )
    return read_out(call, made)


def read_out(call: GenerateCall, made: Sequence[int]) -> tuple[list[int], str, Reason]:
    """What of these ids is the answer."""
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


def is_poisoned(call: GenerateCall) -> bool:
    """Whether a device meets the token that kills it."""
    assert call.token_ids is not None
    return POISON_ID in call.token_ids or POISON_ID in expected(call)[0][:-1]


def draw_plans(world: World) -> list[Plan]:
    options = world.options
    rng = random.Random(f"clients {options.seed}")
    prefix = tuple(rng.randrange(256) for _ in range(rng.randint(1, 8)))
    plans: list[Plan] = []
    for i in range(options.num_clients):
        plan = _draw_plan(world, rng, i, prefix)
        rivals = [
            _draw_rival(rng, plan, k)
            for k in range(2 if plan.call.client_key and rng.random() < options.twin else 0)
            if rng.random() < 0.7
        ]
        plans += [replace(p, rivals=len(rivals)) for p in (plan, *rivals)]
    if options.tiers is not None:
        plans = _come_back(options.seed, plans)
    world.calls = [plan.call for plan in plans]
    return plans


def _come_back(seed: int, plans: list[Plan]) -> list[Plan]:
    """Most ask what one of the first four asked before."""
    rng = random.Random(f"who comes back {seed}")
    for k, plan in enumerate(plans):
        if k > 3 and not plan.call.client_key and rng.random() < 0.9:
            before = plans[rng.randrange(4)].call.token_ids
            plans[k] = replace(plan, call=replace(plan.call, token_ids=before))
    return plans


def _draw_plan(world: World, rng: random.Random, i: int, prefix: tuple[int, ...]) -> Plan:
    options = world.options
    prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, options.prompt_len_max)))
    if options.shared_prefix and rng.random() < 0.7:
        prompt = prefix + prompt
    if "poison" in options.faults and i == 0:
        prompt = (*prompt, POISON_ID)
    leaves = rng.random() < options.leave
    output_len = options.output_len_max if leaves else rng.randint(1, options.output_len_max)
    call = GenerateCall(
        tenant=tenant_of(draw_knobs(options.seed, options.waiting_len_max), options.seed, i),
        token_ids=prompt,
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.getrandbits(63),
        max_tokens=output_len,
        stop=rng.choice(((), (), ("e",), ("at", " s"))),
        ignore_eos=rng.random() < 0.3,
        priority=rng.choice((0, 5, 5, 9)),
        timeout_ms=rng.choice((200, 2000)) if rng.random() < options.deadline else 0,
        resume_window_s=rng.choice((0, 1, 1, 20)) if leaves else rng.choice((0, 0, 20)),
        client_key=f"key{i}" if rng.random() < options.keyed else "",
    )
    shaped = random.Random(f"shaping {options.seed} {i}")
    if shaped.random() < 0.4:
        call = replace(call, repetition_penalty=1.5)
    if shaped.random() < 0.4:
        call = replace(call, top_logprobs=shaped.randint(0, 2))
    if shaped.random() < 0.4:
        call = replace(call, prompt_logprobs=shaped.randint(0, 2))
    if shaped.random() < 0.4:
        call = replace(call, stream_interval=shaped.randint(1, 8))
    if (grammar := draw_grammar(options.seed, i)) is not None:
        call = replace(call, grammar=grammar, ignore_eos=False)
    return Plan(
        name=f"c{i}",
        start_s=rng.choice((0.0, rng.uniform(0, options.fault_time_s))),
        call=call,
        cancel_after=rng.randrange(output_len) if rng.random() < options.cancel else None,
        leave_after=rng.randrange(min(output_len, 6)) if leaves else None,
        away_s=rng.choice((0.0, 0.3, 0.6, 15.0, None)),
    )


def _draw_rival(rng: random.Random, plan: Plan, k: int) -> Plan:
    """It asks with the same key: for the same, or for something else, also under another subject."""
    call = plan.call
    if rng.random() < 0.5:
        call = replace(call, seed=k, max_tokens=3)
        if rng.random() < 0.5:
            call = replace(call, priority=((call.priority or 0) + 1) % 10)
    start_s = plan.start_s + rng.choice((0.0, 0.005, 0.3))
    return replace(
        plan, name=f"{plan.name}r{k}", start_s=start_s, call=call, cancel_after=None, leave_after=None
    )


def _read(told: IdLogprobs) -> TokenLogprobs:
    top_ids, top = tuple(t.id for t in told.top), tuple(t.logprob for t in told.top)
    return TokenLogprobs(told.logprob, told.rank, top_ids, top)


class SimClient:
    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.outcome = Outcome(plan)
        self._rng = random.Random(f"client {world.options.seed} {plan.name}")
        self._away = False
        self._last_text = ""

    async def run(self) -> None:
        plan, outcome = self.outcome.plan, self.outcome
        await asyncio.sleep(plan.start_s)
        for _ in range(RETRIES_MAX):
            node = await self._gateway()
            try:
                await self._listen(node)
            except Status as status:
                if not self._again(status):
                    outcome.reason, outcome.message = status.code.name, status.message
                    break
            if outcome.finished:
                break
            away_s: float | None = RETRY_S
            if self._away:
                away_s, self._away = plan.away_s, False
            if away_s is None:
                outcome.reason = GONE
                break
            await asyncio.sleep(away_s or RETRY_S)
        else:
            self.world.fail(f"{plan.name} never came to an end")
        self.world.note(f"{plan.name} ends: {outcome.reason} {outcome.message} {outcome.request_id}")

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
        self._last_text = ""
        if not outcome.ids:
            outcome.prompt.clear()  # all of it comes again
        since: float | None = None
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, Accepted):
                        since = loop.time()
                    if await self._take(node, event):
                        return
        finally:
            if since is not None:
                outcome.heard.append((since, loop.time()))

    async def _take(self, node: Node, event: GenerateEvent) -> bool:
        """Whether it hears no more after this."""
        plan, outcome = self.outcome.plan, self.outcome
        match event:
            case Accepted(request_id=request_id):
                if outcome.request_id not in (None, request_id):
                    self.world.fail(f"{plan.name}: another id on resume")
                outcome.request_id = request_id
                self.world.note(f"{plan.name} accepted {request_id} at {node.name}")
            case PromptLogprobs():
                self._prompt(event)
            case Delta():
                self._delta(event)
            case Finished():
                assert outcome.request_id is not None
                if not self.world.broker.is_over(outcome.request_id):
                    self.world.fail(f"{plan.name} is told the end before it is stored")
                outcome.reason, outcome.finished = event.reason.name, True
                outcome.text += self._last_text
                return True
        if self._wants_to_leave():
            self.world.note(f"{plan.name} hangs up with {len(outcome.ids)}")
            self._away = True
            return True
        await self._maybe_cancel(node)
        return False

    def _prompt(self, told: PromptLogprobs) -> None:
        """Each place once, in order, before any output."""
        outcome, call = self.outcome, self.outcome.plan.call
        first, end = told.first_index, told.first_index + len(told.ids)
        if outcome.ids or first != 1 + len(outcome.prompt) or call.prompt_logprobs is None:
            self.world.fail(
                f"{outcome.plan.name}: told of its prompt from {first}, behind {len(outcome.prompt)}"
            )
        if call.token_ids is None or told.ids != call.token_ids[first:end]:
            self.world.fail(f"{outcome.plan.name}: told of other ids than its prompt's")
        outcome.prompt += map(_read, told.logprobs)

    def _begins(self) -> None:
        """With the first output id the whole prompt was told, unless who knew it were lost."""
        outcome, call = self.outcome, self.outcome.plan.call
        if call.prompt_logprobs is None or call.token_ids is None:
            return
        want = prompt_oracle(call.token_ids, call.prompt_logprobs, NUM_LAYERS)
        if outcome.prompt != want and (outcome.prompt or not self.world.num_deaths):
            self.world.fail(f"{outcome.plan.name}: {outcome.prompt} told of its prompt, not {want}")

    def _delta(self, delta: Delta) -> None:
        outcome = self.outcome
        if delta.ids and not outcome.ids:
            self._begins()
        if delta.ids and delta.first_index != len(outcome.ids):
            self.world.fail(f"{outcome.plan.name}: index {delta.first_index} after {len(outcome.ids)} ids")
        outcome.ids.extend(delta.ids)
        self._logprobs(delta)
        if delta.ids:
            outcome.text += delta.text
        else:
            self._last_text = delta.text  # comes again unless Finished does

    def _logprobs(self, delta: Delta) -> None:
        """Of every id what the model says of it; not known only where its owner was lost."""
        top = self.outcome.plan.call.top_logprobs
        if top is None:
            return
        if len(delta.logprobs) != len(delta.ids):
            self.world.fail(f"{self.outcome.plan.name}: {len(delta.logprobs)} told of {len(delta.ids)} ids")
            return
        for token_id, told in zip(delta.ids, delta.logprobs, strict=True):
            want = logprobs_of(token_id, top)
            found = _read(told)
            if found not in (want, UNTOLD) or (found == UNTOLD and not self.world.num_deaths):
                self.world.fail(f"{self.outcome.plan.name}: {found} told of {token_id}")

    def _wants_to_leave(self) -> bool:
        """Once."""
        plan = self.outcome.plan
        if plan.leave_after is None or self.outcome.left or len(self.outcome.ids) < plan.leave_after:
            return False
        self.outcome.left = True
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
        starting = any(w in status.message for w in ("none is served", "not running", "draining"))
        refused = "the queue" in status.message  # its record says so: asking again brings the same
        return status.code is Code.UNAVAILABLE and (known or starting) and not refused
