"""Links between hosts: what is taken where, and what a cut does to one over NIXL."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chassis.transport.nixl_agent import Lanes, why_not
from tests.hosts.lab import ROOT, Host, Lab

DEFAULT = "unix,nixl+rdma,tcp"
WITHOUT = why_not(Lanes.TCP)


@contextmanager
def peer(host: Host, *words: str) -> Iterator["subprocess.Popen[str]"]:
    argv = host.words(sys.executable, "-m", "tests.chassis.link_peer", *words)
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_link_leaves_the_host_only_if_it_must(two: Lab) -> None:
    """The hosts share their files, their kernel and its boot id: none of that makes them one."""
    first, second = two.hosts
    with peer(second, DEFAULT, second.address) as listening:
        address = line(listening)
        with peer(second, DEFAULT, "dial", address) as near, peer(first, DEFAULT, "dial", address) as far:
            assert (line(near), line(far)) == ("unix", "tcp")


@pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))
def test_a_cut_ends_a_link_over_nixl_and_a_new_one_stands_after_it(two: Lab) -> None:
    first, second = two.hosts
    with peer(second, "nixl+tcp", second.address) as listening:
        address = line(listening)
        with peer(first, "nixl+tcp", "dial", address) as far:
            assert line(far) == "nixl+tcp"
            two.cut(second)
            assert line(far).startswith("closed: ")
            assert far.wait(20) == 0
        two.heal()
        with peer(first, "nixl+tcp", "dial", address) as again:
            assert line(again) == "nixl+tcp"
