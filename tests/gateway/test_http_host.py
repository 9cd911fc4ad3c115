"""Without keys a page elsewhere must not reach the door under a name of its own for this machine."""

from typing import Any

import pytest

from gateway.config import Config
from gateway.http_host import is_here, stranger
from tests.gateway.http_client import raw
from tests.gateway.rig import run
from tests.gateway.test_http_door import door


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "a.localhost:80",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8000",
        "[::1]",
    ],
)
def test_names_of_this_machine_alone(host: str) -> None:
    assert is_here(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "notlocalhost", "192.0.2.1:8000", "[2001:db8::1]:8000", "0.0.0.0:8000", "unix:evil", ":8000",
     "127.0.0.1@evil.example", "\xff"],
)  # fmt: skip
def test_names_that_others_can_give(host: str) -> None:
    assert not is_here(host)


def test_who_names_nobody_is_no_browser() -> None:
    assert stranger([(b"accept", b"x"), (b"host", b"")]) == ""
    assert stranger([(b"host", b"localhost"), (b"host", b"evil.example")]) == "evil.example"


@pytest.mark.parametrize(
    ("settings", "status"),
    [({}, b"403"), ({"insecure": True}, b"200"), ({"keys_file": "keys.toml"}, b"200")],
    ids=["no keys", "said to be insecure", "keys"],
)
def test_a_page_elsewhere_is_refused_where_there_are_no_keys(settings: dict[str, Any], status: bytes) -> None:
    async def life() -> None:
        async with door(**settings) as address:
            told = await raw(
                address, b"GET /health HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
            )
            assert told.split()[1] == status
            if status == b"403":
                assert b"host: 'evil.example'" in told
            told = await raw(
                address, b"GET /health HTTP/1.1\r\nhost: localhost:1\r\nconnection: close\r\n\r\n"
            )
            assert told.split()[1] == b"200"

    run(life())


def test_certificates_are_keys_too() -> None:
    made = Config(tls_certificate_file="c", tls_key_file="k", tls_client_ca_file="ca")
    assert not made.http_is_private and Config().http_is_private
