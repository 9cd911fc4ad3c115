"""What is said at once of whoever cannot join, and where services listen."""

import asyncio
import socket
from pathlib import Path

import pytest

from chassis.nats_access import access_of
from shoal.joining import (
    check_host,
    is_guarded,
    layers_of,
    reached_from,
    secure_flags,
    secured_url,
)
from shoal.listening import Listening
from shoal.nats_server import free_port
from shoal.plan import LaunchError


def test_a_service_listens_where_others_reach_it_on_ports_that_stay() -> None:
    some = Listening("192.0.2.7", first_port=7000)
    worker = ("--listen", "tcp://192.0.2.7:7000", "--rpc-listen", "192.0.2.7:7001")
    assert some.flags("worker-0", "shard_worker") == worker
    assert some.flags("batcher", "batcher") == ("--listen", "tcp://192.0.2.7:7002")
    assert some.flags("kvstore", "kvstore") == ("--rpc-address", "192.0.2.7:7003")
    assert some.flags("gateway", "gateway") == ()
    assert some.flags("worker-0", "shard_worker") == worker  # started again
    assert Listening("2001:db8::7").flags("b", "batcher") == ("--listen", "tcp://[2001:db8::7]:0")


def test_the_address_by_which_the_bus_is_reached() -> None:
    async def go() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            nobody = free_port()
            both = f"nats://127.0.0.1:{nobody},nats://127.0.0.1:{port}"
            assert await reached_from(both, "shard_worker") == "127.0.0.1"
        finally:
            server.close()
        with pytest.raises(LaunchError, match=f"no NATS at nats://127.0.0.1:{nobody}: Connection refused"):
            await reached_from(f"nats://127.0.0.1:{nobody}", "shard_worker")

    asyncio.run(go())


@pytest.mark.parametrize("url", ["http://192.0.2.1:4222", "192.0.2.1:4222", "nats://", "nats", "nats://[::1"])
def test_what_is_no_url_of_a_bus(url: str) -> None:
    with pytest.raises(LaunchError, match=r"nats://HOST:PORT"):
        asyncio.run(reached_from(url, "shard_worker"))


def test_a_name_that_is_none_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(host: str, port: int) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio, "open_connection", unknown)
    with pytest.raises(
        LaunchError, match="no NATS at nats://no.such.invalid:4222: Name or service not known"
    ):
        asyncio.run(reached_from("nats://no.such.invalid:4222", "gateway"))


def test_a_password_in_a_url_is_not_said() -> None:
    with pytest.raises(LaunchError) as told:
        asyncio.run(reached_from(f"nats://user:secret@127.0.0.1:{free_port()}", "gateway"))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("0.0.0.0", "others dial"),
        ("::", "others dial"),
        ("", "others dial"),
        ("0", "others dial"),
        ("0:0::0", "others dial"),
        ("192.0.2.200", "no address of this machine"),
        ("a b", "no address of this machine"),
        ("x" * 70, "no address of this machine"),
    ],
)
def test_addresses_that_nobody_can_dial(host: str, why: str) -> None:
    with pytest.raises(LaunchError, match=why):
        check_host(host, "--host")
    check_host("127.0.0.1", "--host")


@pytest.mark.parametrize("text", ["", "3", "5:5", "7:3", "-1:4", "a:b", "0:1000000", "1:2:3", "AUTO"])
def test_layers_that_are_no_range(text: str) -> None:
    with pytest.raises(LaunchError, match="FIRST:END"):
        layers_of(text)
    assert layers_of("auto") is None and layers_of("0:15") == range(15)


def test_what_a_role_needs_of_the_guarded_files(tmp_path: Path) -> None:
    for file in ("nats/ca.pem", "nats/credentials/shard_worker.toml", "rpc/ca.pem", "rpc/service.pem"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(LaunchError, match=r"a worker needs rpc/service\.key"):
        secure_flags(tmp_path, ["worker"])
    (tmp_path / "rpc/service.key").touch()
    assert secure_flags(tmp_path, ["worker", "worker"]) == {
        "shard_worker": ("--rpc-tls-dir", str(tmp_path / "rpc"))
    }
    with pytest.raises(LaunchError, match=r"a gateway needs nats/credentials/gateway\.toml"):
        secure_flags(tmp_path, ["worker", "gateway"])
    url = secured_url("tls://192.0.2.1:4222", tmp_path)
    (tmp_path / "nats/credentials/shard_worker.toml").write_text('user = "shard_worker"\npassword = "p"\n')
    with pytest.raises(Exception, match="TLS files"):  # the certificate is empty
        access_of(url, "shard_worker")
    assert secured_url("tls://h:1?ca=mine", tmp_path) == "tls://h:1?ca=mine"
    assert secured_url("nats://h:1", None) == "nats://h:1"


def test_gateways_are_guarded_by_keys_and_tls_together(tmp_path: Path) -> None:
    config = tmp_path / "shoal.toml"
    for text, guarded in (
        ('keys_file = "k"\ntls_key_file = "t"', True),
        ('keys_file = "k"', False),
        ('tls_key_file = "t"', False),
        ("", False),
    ):
        config.write_text(f"[gateway]\n{text}\n")
        assert is_guarded(config) is guarded
    assert not is_guarded(None) and not is_guarded(tmp_path / "none.toml")


def test_addresses_have_both_families() -> None:
    if socket.has_ipv6:
        check_host("::1", "--host")
