"""Drives the real ownership cores through faults: every place of a fault, then random walks.

`SHOAL_MODEL_WALKS` sets the number of random walks. A failure prints the seed and the way there; the same
seed walks the same way.
"""

import os
import random

import pytest

from tests.model.broken_rules import RULES, Rule
from tests.model.world import Action, Bad, Setting, World

WALKS = int(os.environ.get("SHOAL_MODEL_WALKS", "300"))


class Found(Exception):
    """A counterexample, with the way to it."""


def setting_of(rng: random.Random, **fixed: object) -> Setting:
    choices: dict[str, object] = {
        "tokens": rng.choice((2, 3, 5)),
        "same": rng.random() < 0.3,
        "honour_old": rng.random() < 0.7,
        "keyed": rng.random() < 0.5,
        "window_s": rng.choice((0.0, 0.0, 3.0)),
        "timeout_s": rng.choice((0.0, 0.0, 0.0, 2.5)),
        "batchers": rng.choice((2, 2, 2, 1)),
    }
    return Setting(**(choices | fixed))  # type: ignore[arg-type]


def walk(seed: int, words: tuple[str, ...] = (), **fixed: object) -> World:
    """A random run with a few faults (only those whose label holds one of `words`), then a fair end."""
    rng = random.Random(seed)
    world = World(setting_of(rng, **fixed), rng)
    faults, wishes = rng.randint(0, 5), rng.randint(0, 2)
    weights = {**WEIGHTS, "step": rng.choice((0.3, 1, 6)), "advance": rng.choice((1, 2, 8))}
    weights |= dict.fromkeys(rng.sample(SLOW, 2), 0.2)
    lines: list[str] = []
    try:
        for _ in range(rng.randint(10, 160)):
            action = choose(world, rng, weights, faults, wishes, words)
            if action is None:
                break
            faults -= action.kind == "fault"
            wishes -= action.kind == "client"
            lines.append(f"{world.now:8.2f} {action.label}")
            world.apply(action)
        lines.append("-- a fair end")
        world.settle()
    except (Bad, AssertionError) as error:
        way = "\n".join(lines)
        raise Found(f"{error!r}\nseed {seed} {world.setting}\n{way}\nlog {world.log}") from error
    return world


WEIGHTS: dict[str, float] = {"deliver_item": 6, "admit": 3, "deliver_message": 3}
SLOW = ["write", "write done", "read done", "part", "takeover?", "takeover answer", "owner answer", "refused"]
SLOW += ["attach", "gateway read done", "cancel write", "finish", "ack", "late write", "receipt"]


def choose(
    world: World,
    rng: random.Random,
    weights: dict[str, float],
    faults: int,
    wishes: int,
    words: tuple[str, ...],
) -> Action | None:
    """Fair steps by weight; faults evenly by their sort, because there are many more losses than deaths."""
    dice = rng.random()
    others: list[Action] = []
    if dice < 0.12 and faults:
        others = [a for a in world.faults() if not words or any(word in a.label for word in words)]
    elif dice < 0.16 and wishes:
        others = world.wishes()
    elif dice < 0.20:
        others = world.recoveries()
    if others:
        sort = rng.choice(list(dict.fromkeys(a.sort for a in others)))
        return rng.choice([a for a in others if a.sort == sort])
    fair = world.fair()
    if not fair:
        return None
    return rng.choices(fair, [weights.get(a.label.split(" >")[0], weights[a.method]) for a in fair])[0]


def one_fault_everywhere(setting: Setting, recover_after: int) -> int:
    """The plain way, hit after each step by each fault; the others go on for a while, then all recover."""
    runs = 0
    for steps in range(60):
        k = 0
        while True:
            world = World(setting, random.Random(steps))
            for _ in range(steps):
                world.apply(world.fair()[0])
            if world.quiet():
                return runs
            others = world.faults() + world.wishes()
            if k >= len(others):
                break
            way = f"{setting}: {steps} steps, then {others[k].label}"
            try:
                world.apply(others[k])
                for _ in range(recover_after):
                    if fair := world.fair():
                        world.apply(fair[0])
                world.settle()
            except (Bad, AssertionError) as error:
                raise Found(f"{error!r} after {way}\nlog {world.log}") from error
            k, runs = k + 1, runs + 1
    return runs


@pytest.mark.parametrize("recover_after", [0, 40])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(same=True, keyed=False, honour_old=False),
        Setting(window_s=3.0, batchers=1),
    ],
    ids=["plain", "same tokens", "one batcher"],
)
def test_one_fault_at_every_place(setting: Setting, recover_after: int) -> None:
    assert one_fault_everywhere(setting, recover_after) > 150


@pytest.mark.parametrize("block", range(5))
def test_random_walks_hold_the_invariants(block: int) -> None:
    for seed in range(block * WALKS // 5, (block + 1) * WALKS // 5):
        walk(seed)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_broken_rule_is_caught(rule: Rule) -> None:
    with pytest.raises(Found):
        for seed in range(400):
            walk(seed, rule.faults, **rule.fixed)
