"""Tests of this folder need several hosts: they skip, with the reason, where there can be none."""

from collections.abc import Iterator

import pytest

from tests.hosts.lab import Lab, missing


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture
def two(can_have_hosts: None) -> Iterator[Lab]:
    with Lab(2) as lab:
        yield lab


@pytest.fixture
def three(can_have_hosts: None) -> Iterator[Lab]:
    with Lab(3) as lab:
        yield lab


@pytest.fixture
def four(can_have_hosts: None) -> Iterator[Lab]:
    with Lab(4) as lab:
        yield lab
