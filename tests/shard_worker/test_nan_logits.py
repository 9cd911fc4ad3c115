"""A row whose logits are no numbers is named, and the rows beside it are drawn as ever."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from chassis.messages.sampling import Sampling, Shaping
from shard_worker import sampler
from shard_worker.device import sampling as device
from shard_worker.uniforms import uniforms
from tests.shard_worker.test_sampling_rules import LOGITS, Row, columns_for, inputs_for

KINDS = [
    Sampling(0.0),
    Sampling(0.8),
    Sampling(1.0, 3),
    Sampling(1.0, 0, 0.7),
    Sampling(0.9, 4, 0.8, Shaping(min_p=0.1, typical_p=0.6)),
    Sampling(1.0, shaping=Shaping(repetition_penalty=1.3, logit_bias=((2, 1.0),))),
    Sampling(0.0, logprobs=3),
    Sampling(0.7, 3, 0.9, Shaping(allowed_ids=(1, 2, 3)), logprobs=20),
]
BROKEN = {
    "nan": [math.nan] * len(LOGITS),
    "one nan": [*LOGITS[:3], math.nan, *LOGITS[4:]],
    "infinity": [*LOGITS[:3], math.inf, *LOGITS[4:]],
    "nothing": [-math.inf] * len(LOGITS),
}


def rows() -> list[Row]:
    return [Row(sampling, seed=i) for i, sampling in enumerate(KINDS)]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("place", range(len(KINDS)))
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_it_is_named_and_the_others_are_as_alone(broken: str, place: int, kind: str) -> None:
    logits = torch.tensor([LOGITS] * len(KINDS))
    whole = sampler.output(logits.clone(), inputs_for(rows()))
    assert whole.nan_rows == () and whole.tells
    logits[place] = torch.tensor(BROKEN[broken])
    given: Any = logits.clone() if kind == "torch" else logits.numpy().copy()
    found = sampler.output(given, inputs_for(rows()))
    assert found.nan_rows == (place,) and found.tells
    others = [i for i in range(len(KINDS)) if i != place]
    assert found.token_ids[others].tolist() == whole.token_ids[others].tolist()
    assert found.token_ids[place] < len(LOGITS), "it is fed to the step behind it"
    assert found.logprobs is not None and whole.logprobs is not None
    for at, told in zip(found.logprobs.places.tolist(), found.logprobs.logprobs.tolist(), strict=True):
        if at != place:
            assert told == whole.logprobs.logprobs[whole.logprobs.places.tolist().index(at)]


def test_a_nan_that_may_not_be_said_harms_nobody() -> None:
    """What its own parameters keep out is not drawn from."""
    logits = torch.tensor([LOGITS])
    logits[0, 5] = math.nan
    row = Row(Sampling(1.0, shaping=Shaping(bad_words=((5,),))), seed=3)
    assert sampler.drawn(logits, columns_for([row]))[1] == ()


@pytest.mark.parametrize("broken", BROKEN)
def test_the_devices_rules_name_it_too(broken: str) -> None:
    plain = [Row(sampling, seed=i) for i, sampling in enumerate(KINDS[:4])]
    inputs, c = inputs_for(plain), columns_for(plain)
    u = torch.from_numpy(uniforms(c.seeds, c.output_index))
    t, k, p = (torch.from_numpy(x) for x in (c.temperature, c.top_k, c.top_p))
    logits = torch.tensor([LOGITS] * len(plain))
    whole, none = device.ids_of(device.sample(logits.clone(), inputs, t, k, p, u).numpy())
    assert none == ()
    for place in range(len(plain)):
        wrong = logits.clone()
        wrong[place] = torch.tensor(BROKEN[broken])
        ids, found = device.ids_of(device.sample(wrong, inputs, t, k, p, u).numpy())
        assert found == (place,) and ids.max() < len(LOGITS)
        assert np.delete(ids, place).tolist() == np.delete(whole, place).tolist()
