"""Which link is taken of those that are offered, what `require` refuses, and that both ends say which."""

import asyncio
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable

import pytest

from chassis.config import ConfigError, load
from chassis.errors import LinkClosed
from chassis.ids_source import id_source
from chassis.messages import BadMessage
from chassis.messages.addresses import from_wire, join_addresses, split_addresses, to_wire
from chassis.service import ChassisConfig
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import Link, LinkOptions
from chassis.transport.kinds import Kind, Links
from chassis.transport.nixl import NixlLinks
from chassis.transport.nixl_agent import Agent, AgentError, Lanes
from chassis.transport.tcp import SocketTransport

OPTIONS = LinkOptions(slots=3, send_timeout_s=2.0)
new_id = id_source(time.time_ns)


def everything(lanes: Lanes) -> str | None:
    return None


def nothing(lanes: Lanes) -> str | None:
    return "this host has no RDMA device"


def broken(name: str, lanes: Lanes) -> Agent:
    raise AgentError("the fabric is down")


class Node:
    """A transport and what it accepted."""

    def __init__(
        self, *kinds: Kind, require: str = "", lacks: Callable[[Lanes], str | None] = nothing
    ) -> None:
        clock = asyncio.get_running_loop().time
        links = Links(kinds or Links().kinds, require)  # type: ignore[arg-type]
        self.transport = ChosenTransport(
            links, new_id, clock, nixl=NixlLinks(new_id, clock, make_agent=broken), lacks=lacks
        )
        self.accepted: asyncio.Queue[Link] = asyncio.Queue()

    async def listen(self, address: str = "tcp://127.0.0.1:0") -> str:
        return await self.transport.listen(address, self.accepted.put_nowait, OPTIONS)

    async def dial(self, address: str, timeout_s: float = 2.0) -> Link:
        return await self.transport.dial(address, b"hi", OPTIONS, timeout_s)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await body()
            await asyncio.sleep(0)  # what was closed is told so

    asyncio.run(main())


def test_on_one_host_it_is_a_unix_socket_without_a_file() -> None:
    async def body() -> None:
        a, b = Node(), Node()
        address = await b.listen()
        assert [one.partition("://")[0] for one in split_addresses(address)] == ["unix", "tcp"]
        assert address.startswith("unix://@shoal-"), "a name, not a path"
        link = await a.dial(address)
        far = await b.accepted.get()
        assert link.kind == far.kind == "unix"
        await link.send(b"header", b"payload")
        frame = await far.receive()
        assert (frame.header, bytes(frame.payload)) == (b"header", b"payload")
        frame.release()
        await a.transport.close()
        await b.transport.close()

    run(body)


def test_where_the_name_is_not_known_it_is_tcp() -> None:
    """As on another host, or in another network namespace."""

    async def body() -> None:
        a, b = Node(), Node()
        address = await b.listen()
        name, plain = split_addresses(address)
        link = await a.dial(f"{name}-of-another-host {plain}")
        assert link.kind == (await b.accepted.get()).kind == "tcp"
        await a.transport.close()
        await b.transport.close()

    run(body)


def test_who_knows_one_address_only_is_still_reached() -> None:
    async def body() -> None:
        a, b = SocketTransport(), Node()
        known, _ = to_wire(await b.listen())
        link = await a.dial(known, b"hi", OPTIONS)
        assert link.kind == (await b.accepted.get()).kind == "tcp"
        old: asyncio.Queue[Link] = asyncio.Queue()
        plain = await a.listen("tcp://127.0.0.1:0", old.put_nowait, OPTIONS)
        assert (await b.dial(plain)).kind == "tcp"
        await a.close()
        await b.transport.close()

    run(body)


def test_a_link_that_fails_falls_back_unless_rdma_is_required() -> None:
    async def body() -> None:
        free, strict = Node(lacks=everything), Node(require="rdma", lacks=everything)
        far = Node("nixl+rdma", "tcp", lacks=everything)
        address = await far.listen()
        assert [one.partition("://")[0] for one in split_addresses(address)] == ["nixl+rdma", "tcp"]
        assert (await free.dial(address)).kind == "tcp"
        with pytest.raises(
            LinkClosed, match='links.require = "rdma".*offered: nixl[+]rdma, tcp.*fabric is down'
        ):
            await strict.dial(address)
        for node in (free, strict, far):
            await node.transport.close()

    run(body)


def test_required_rdma_is_no_hindrance_on_one_host() -> None:
    async def body() -> None:
        a, b = (Node(require="rdma", lacks=everything) for _ in range(2))
        address = await b.listen()
        assert [one.partition("://")[0] for one in split_addresses(address)] == ["unix", "nixl+rdma"]
        assert (await a.dial(address)).kind == "unix"
        await a.transport.close()
        await b.transport.close()

    run(body)


def test_who_requires_rdma_accepts_no_plain_link() -> None:
    async def body() -> None:
        a, b = SocketTransport(), Node(require="rdma", lacks=everything)
        place = split_addresses(await b.listen())[1].removeprefix("nixl+rdma")
        link = await a.dial("tcp" + place, b"hi", OPTIONS)
        with pytest.raises(LinkClosed):
            await link.receive()
        assert b.accepted.empty()
        await a.close()
        await b.transport.close()

    run(body)


@pytest.mark.parametrize("kinds, require", [((), "rdma"), (("nixl+tcp",), ""), (("nixl+shm", "tcp"), "")])
def test_what_was_asked_for_and_is_not_there_is_an_error(kinds: tuple[Kind, ...], require: str) -> None:
    async def body() -> None:
        node = Node(*kinds, require=require, lacks=lambda lanes: "pip install 'shoal[rdma]'")
        with pytest.raises(ConfigError, match=r"\[chassis.links\] nixl\+.*shoal\[rdma\]"):
            await node.listen()
        with pytest.raises(ConfigError):
            await node.dial("tcp://127.0.0.1:9")
        await node.transport.close()

    run(body)


def test_a_peer_that_does_not_answer_costs_one_time_limit() -> None:
    async def body() -> None:
        deaf = socket.socket(socket.AF_UNIX)
        deaf.bind("\0" + new_id())
        deaf.listen()
        name = str(deaf.getsockname()[1:], "ascii")
        a, b = Node(), Node()
        plain = split_addresses(await b.listen())[1]
        with pytest.raises(LinkClosed, match="no answer in time"):
            await a.dial(f"unix://@{name} {plain}", timeout_s=0.1)
        assert b.accepted.empty()
        deaf.close()
        await a.transport.close()
        await b.transport.close()

    run(body)


def test_files_are_listened_on_as_before() -> None:
    async def body(folder: str) -> None:
        a, b = Node(), Node()
        address = await b.listen(f"unix://{folder}/s")
        assert address == f"unix://{folder}/s"
        assert (await a.dial(address)).kind == "unix"
        await a.transport.close()
        await b.transport.close()

    with tempfile.TemporaryDirectory() as folder:
        run(lambda: body(folder))


@pytest.mark.parametrize("address", ["tcp://host", "http://h:1", "h:1", "", "tcp://h:99999"])
def test_bad_addresses(address: str) -> None:
    async def body() -> None:
        node = Node()
        with pytest.raises(ValueError):
            await node.dial(address)
        await node.transport.close()

    run(body)


def test_configuration() -> None:
    text = '{ kinds = ["nixl+rdma", "tcp"], require = "rdma" }'
    config = load(ChassisConfig, "chassis", flags=["--links", text])
    assert config.links == Links(("nixl+rdma", "tcp"), "rdma")
    assert load(ChassisConfig, "chassis").links == Links()
    for bad in (
        '{ require = "tcp" }',
        '{ kinds = ["pigeon"] }',
        "{ kinds = [] }",
        '{ kinds = ["tcp", "tcp"] }',
    ):
        with pytest.raises(ConfigError, match="links"):
            load(ChassisConfig, "chassis", flags=["--links", bad])
    with pytest.raises(ConfigError, match="nixl[+]rdma"):
        load(ChassisConfig, "chassis", flags=["--links", '{ kinds = ["tcp"], require = "rdma" }'])


def test_addresses_on_the_wire() -> None:
    text = "unix://@x nixl+rdma://h:1 tcp://h:1"
    assert to_wire(text) == ("tcp://h:1", ["unix://@x", "nixl+rdma://h:1"])
    assert from_wire(*to_wire(text)) == text
    assert to_wire("unix:///s") == ("unix:///s", []) and from_wire("unix:///s", []) == "unix:///s"
    assert from_wire(*to_wire("unix://@x nixl+rdma://h:1")) == "nixl+rdma://h:1 unix://@x", "none is lost"
    for bad in ([], ["a b"], ["x" * 257], ["tcp://h:1"] * 9, ["a\n"], [""]):
        with pytest.raises(BadMessage):
            join_addresses(bad)


def test_the_first_agent_is_made_beside_the_start_where_links_may_need_one() -> None:
    """It takes half a second: the first link, and with it a pool's first prompts, would wait for it."""

    async def body() -> None:
        loop, clock = asyncio.get_running_loop(), asyncio.get_running_loop().time
        for kinds, warmed in (
            (("unix", "tcp"), []),
            (("unix", "nixl+rdma", "tcp"), [Lanes.RDMA]),
            (("nixl+tcp",), [Lanes.TCP]),
        ):
            made: list[Lanes] = []
            done = asyncio.Event()

            def warm(lanes: Lanes, made: list[Lanes] = made, done: asyncio.Event = done) -> None:
                made.append(lanes)
                loop.call_soon_threadsafe(done.set)

            links = Links(kinds)  # type: ignore[arg-type]
            transport = ChosenTransport(links, new_id, clock, lacks=lambda _: None, warm=warm)
            transport.prepare()
            if warmed:
                await done.wait()
            assert made == warmed
            await transport.close()

    run(body)
