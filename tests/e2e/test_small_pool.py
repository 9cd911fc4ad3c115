"""A KV pool smaller than the context: who asks for more than it holds is told so, at each door."""

import asyncio
from collections.abc import Iterator

import pytest

from shoal.client import ShoalError
from tests.e2e.rig import Answer, Running, ask, call, fake_plan, running
from tests.gateway import http_client

LIMIT = 8 * 16 - 1


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    plan = fake_plan(tmp_path_factory.mktemp("small"), "--num-blocks", "8")
    with running(runner, plan) as made:
        yield made


def test_a_prompt_larger_than_the_pool_is_the_callers_doing(shoal: Running) -> None:
    async def life() -> None:
        async with shoal.client() as client:
            with pytest.raises(ShoalError) as refused:
                await ask(client, Answer(call([1] * (LIMIT + 1), 4)))
            assert refused.value.code == "INVALID_ARGUMENT"
            assert f"prompt: {LIMIT + 1} tokens, at most {LIMIT} " in refused.value.message
            asked = {"model": "fake", "prompt": [1] * (LIMIT + 1), "max_tokens": 4}
            address = shoal.deployment.http_addresses[0]
            answer = await http_client.ask(address, "POST", "/v1/completions", asked)
            assert answer.status == 400 and f"at most {LIMIT} " in answer.json()["error"]["message"]
            whole = await ask(client, Answer(call([1] * LIMIT, 4)))
            assert whole.ids, "it has room for one token more"

    shoal.run(life())
