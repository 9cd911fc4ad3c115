"""The real model through everything: its tokens are those of transformers on the same dequantised weights.

Float32, two stages. What came out is put through transformers in one pass: each token must be the likeliest
after those before it, which is what greedy generation would have chosen. Beyond a place where two tokens are
nearly alike nothing is compared; that this leaves enough is asserted.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from shoal.client import AsyncClient, Delta, Finished, Params, Prompt
from shoal.launcher import Plan
from tests.e2e.rig import Running, running
from tests.shard_worker.smollm2_answers import ANSWERS
from tests.shard_worker.test_smollm2 import transformers_model
from tests.shard_worker.tiny_models import MARGIN_MIN, greedy

OUTPUT_LEN = 16
GREEDY = Params(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
STORY = (
    "A fisherman mends his net before dawn. The sea is calm, and the village sleeps. His daughter brings "
    "him bread and asks why the fish swim together. He thinks for a while, and then he says: "
)


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = {"batcher": ("--step-tokens-max", "96")}  # the longest prompts take several steps
    with running(runner, Plan(run_dir=tmp_path_factory.mktemp("smollm2"), flags=flags)) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_model()


def prompts() -> list[Prompt]:
    """A dozen, from three tokens to a few hundred."""
    chats: list[Prompt] = [[("user", question)] for question in ANSWERS]
    texts: list[Prompt] = [STORY * n for n in (1, 2, 5)]
    pieces: list[Prompt] = [STORY[start : start + 12 * (start + 1)] for start in (0, 2, 5, 9, 14)]
    return [*chats, *texts, *pieces, [("system", "Answer in French."), ("user", "Where do fish live?")]]


async def answer(client: AsyncClient, prompt: Prompt, params: Params) -> tuple[list[int], Finished]:
    ids: list[int] = []
    async for event in client.generate(prompt, params):
        match event:
            case Delta(_, fresh, first_index):
                assert not fresh or first_index == len(ids)
                ids.extend(fresh)
            case Finished():
                return ids, event
    raise AssertionError("no end")


async def ids_of(client: AsyncClient, prompt: Prompt) -> list[int]:
    assert isinstance(prompt, str) or isinstance(prompt[0], tuple)
    return await client.tokenize(prompt)  # type: ignore[arg-type]


def compared(model: Any, prompt: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of the output could be compared; those are the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    best = logits.float().topk(2)
    for i, token in enumerate(output):
        if best.values[i, 0] - best.values[i, 1] < MARGIN_MIN:
            return i
        assert token == best.indices[i, 0], f"token {i}"
    return len(output)


def test_a_chat_is_answered_as_transformers_would(shoal: Running, reference: Any) -> None:
    question = next(iter(ANSWERS))

    async def life() -> tuple[list[int], list[int], Finished]:
        async with shoal.client() as client:
            prompt = await client.tokenize([("user", question)])
            ids, end = await answer(client, [("user", question)], Params(temperature=0.0, max_tokens=40))
            return prompt, ids, end

    prompt, ids, end = shoal.run(life())
    assert end.reason == "stop"
    expected, margin = greedy(reference, prompt, len(ids))
    assert margin > MARGIN_MIN
    assert ids == expected == ANSWERS[question][: len(ids)]


def test_a_dozen_at_once_are_answered_as_alone(shoal: Running, reference: Any) -> None:
    """Mixed lengths, prompts in chunks beside decodes; then again, with their prefixes cached."""

    async def life() -> tuple[list[list[int]], list[tuple[list[int], Finished]], list[int]]:
        async with shoal.client() as client:
            tokens = [await ids_of(client, prompt) for prompt in prompts()]
            answers = await asyncio.gather(*(answer(client, prompt, GREEDY) for prompt in prompts()))
            longest = max(range(len(tokens)), key=lambda i: len(tokens[i]))
            again, end = await answer(client, prompts()[longest], GREEDY)
            assert end.cached_tokens >= len(tokens[longest]) - 16
            assert again == answers[longest][0]
            return tokens, answers, [len(t) for t in tokens]

    tokens, answers, lens = shoal.run(life())
    assert min(lens) < 8 and max(lens) > 192
    total = sum(compared(reference, p, ids) for p, (ids, _) in zip(tokens, answers, strict=True))
    assert all(len(ids) == OUTPUT_LEN for ids, _ in answers)
    assert total >= 0.9 * OUTPUT_LEN * len(answers)


def test_a_seed_decides_and_not_the_company(shoal: Running) -> None:
    sampled = Params(temperature=0.8, top_p=0.95, seed=11, max_tokens=OUTPUT_LEN, ignore_eos=True)

    async def life() -> None:
        async with shoal.client() as client:
            alone, _ = await answer(client, STORY, sampled)
            crowd = [answer(client, prompt, sampled) for prompt in prompts()[:7]]
            among, *_ = await asyncio.gather(answer(client, STORY, sampled), *crowd)
            assert among[0] == alone
            other, _ = await answer(client, STORY, Params(temperature=0.8, seed=12, max_tokens=OUTPUT_LEN))
            assert other != alone

    shoal.run(life())
