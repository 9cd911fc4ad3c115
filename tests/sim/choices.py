"""Applications that ask for several choices at once: prompts that others share, with copy-on-write.

They hear one stream until it ends or is lost, and come back no more. What each choice tells is held to the
oracle with the choice's own seed. Machines with numerics of their own have no oracle: there are none then.
"""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from chassis.errors import Status
from chassis.messages.gateway import Delta, Finished, GenerateCall
from gateway.admission import choice_seed
from tests.sim.clients import expected
from tests.sim.world import Node, World

SEEDS_SHARE = 0.2  # that have such clients
TRIES_MAX = 40
RETRY_S = 0.1


@dataclass(slots=True)
class Choice:
    call: GenerateCall  # asked for alone it comes out the same
    ids: list[int] = field(default_factory=list)
    text: str = ""
    last_text: str = ""
    reason: str = ""


def draw_choices(world: World) -> "list[ChoiceClient]":
    """Of a seed; they join the calls that the world knows of."""
    rng = random.Random(f"choices {world.options.seed}")
    if world.options.wobbly or rng.random() >= SEEDS_SHARE:
        return []
    clients = [ChoiceClient(world, rng, i) for i in range(rng.randint(1, 3))]
    world.calls += [choice.call for client in clients for choice in client.choices]
    return clients


class ChoiceClient:
    def __init__(self, world: World, rng: random.Random, number: int) -> None:
        self.name = f"n{number}"
        self._world = world
        self._rng = rng
        self._start_s = rng.uniform(0, world.options.fault_time_s)
        prompt_len = rng.randint(1, world.options.prompt_len_max)
        self._call = GenerateCall(
            token_ids=tuple(rng.randrange(256) for _ in range(prompt_len)),
            temperature=1.0,
            seed=rng.getrandbits(63),
            max_tokens=rng.randint(1, world.options.output_len_max),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice((None, 1.5)),
        )
        n = rng.randint(2, 4)
        self.choices = [
            Choice(replace(self._call, seed=choice_seed(self._call.seed or 0, i))) for i in range(n)
        ]

    async def run(self) -> None:
        await asyncio.sleep(self._start_s)
        for _ in range(TRIES_MAX):
            nodes = self._world.nodes
            up = [node for name, node in nodes.items() if name.startswith("gateway") and node.up]
            if up:
                try:
                    await self._listen(self._rng.choice(up))
                    break
                except Status as status:
                    self._world.note(f"{self.name} hears no more: {status.code.name} {status.message}")
                    if any(choice.ids for choice in self.choices):
                        break
            await asyncio.sleep(RETRY_S)
        self._world.note(f"{self.name} ends: {[choice.reason for choice in self.choices]}")
        for i, choice in enumerate(self.choices):
            self._judge(f"{self.name} choice {i}", choice)

    async def _listen(self, node: Node) -> None:
        async with aclosing(node.service.generate(replace(self._call, n=len(self.choices)))) as events:
            async for event in events:
                match event:
                    case Delta():
                        self._delta(self.choices[event.choice], event)
                    case Finished():
                        choice = self.choices[event.choice]
                        choice.reason, choice.text = event.reason.name, choice.text + choice.last_text

    def _delta(self, choice: Choice, delta: Delta) -> None:
        if not delta.ids:
            choice.last_text = delta.text
            return
        if delta.first_index != len(choice.ids):
            self._world.fail(f"{self.name}: index {delta.first_index} after {len(choice.ids)} ids")
        choice.ids += delta.ids
        choice.text += delta.text

    def _judge(self, name: str, choice: Choice) -> None:
        ids, text, reason = expected(choice.call)
        if choice.ids != ids[: len(choice.ids)]:
            self._world.fail(f"{name}: ids {choice.ids} are no prefix of {ids}")
        whole = choice.reason in ("STOP", "LENGTH")
        if whole and (choice.ids, choice.text, choice.reason) != (ids, text, reason.name):
            self._world.fail(
                f"{name}: {choice.ids} {choice.text!r} {choice.reason}, not {ids} {text!r} {reason}"
            )
