"""A device is found by its name, or it is said what is missing."""

import pytest
import torch

from shard_worker.device.choice import Found, chosen
from shard_worker.device.memory import blocks_that_fit
from shard_worker.executor import LoadFailed

NONE = Found("2.13.0+cpu", None, 0)
ASLEEP = Found("2.13.0", "13.0", 0)
TWO = Found("2.13.0", "13.0", 2)


@pytest.mark.parametrize(
    ("name", "has", "device"),
    [
        ("cpu", TWO, "cpu"),
        ("auto", NONE, "cpu"),
        ("auto", ASLEEP, "cpu"),
        ("auto", TWO, "cuda:0"),
        ("cuda", TWO, "cuda:0"),
        ("cuda:1", TWO, "cuda:1"),
    ],
)
def test_a_device_by_its_name(name: str, has: Found, device: str) -> None:
    assert chosen(name, has) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "has", "said"),
    [
        ("cuda", NONE, "device cuda: torch 2.13.0\\+cpu was built without CUDA"),
        ("cuda:1", ASLEEP, "device cuda:1: torch has CUDA 13.0, but no device or driver answers"),
        ("cuda:2", TWO, "device cuda:2: there are 2, numbered from 0"),
        ("cuda:", TWO, "device 'cuda:' is not cpu, cuda, cuda:N or auto"),
        ("cpu:0", TWO, "is not cpu"),
        ("mps", TWO, "is not cpu"),
    ],
)
def test_what_is_missing_is_said(name: str, has: Found, said: str) -> None:
    with pytest.raises(LoadFailed, match=said):
        chosen(name, has)


def test_blocks_take_a_share_of_what_is_free_and_leave_one_for_scrap() -> None:
    assert blocks_that_fit(1000, 0.8, 100, 10) == 69
    assert blocks_that_fit(1000, 0.8, 790, 10) == 0
    assert blocks_that_fit(1000, 0.8, 900, 10) == 0
