"""Certificates on the client's side: whom it trusts, who it says it is, under which name."""

import datetime
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from chassis.wire import gateway_pb2_grpc as pb_grpc
from shoal.client import Client, Tls, Unavailable
from tests.shoal.client.fake_gateway import TEXT, FakeGateway


def certificate(name: str) -> tuple[bytes, bytes]:
    """One that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(pem), plain


SERVER, USER, STRANGER = certificate("gateway.test"), certificate("user"), certificate("stranger")


@contextmanager
def secured(asks: bool) -> Iterator[tuple[str, FakeGateway]]:
    """`asks`: who comes, and lets in the user."""
    gateway, server = FakeGateway(), grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_InferenceServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    roots = USER[0] if asks else None
    credentials = grpc.ssl_server_credentials([(SERVER[1], SERVER[0])], roots, asks)
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    try:
        yield f"localhost:{port}", gateway
    finally:
        server.stop(0).wait()


def test_a_certificate_of_ones_own_authority_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(SERVER[0])
    tls = Tls.of_files(tmp_path / "ca.pem", server_name="gateway.test")
    with secured(asks=False) as (address, gateway), Client(address, tls=tls, api_key="k") as client:
        assert client.complete("hi").text == TEXT
        assert gateway.metadata[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "tls", [True, False, Tls(SERVER[0]), Tls(STRANGER[0], server_name="gateway.test")],
    ids=["the usual ones", "no TLS", "another name", "another authority"],
)  # fmt: skip
def test_whom_it_does_not_trust_it_tells_nothing(tls: Tls | bool) -> None:
    with secured(asks=False) as (address, gateway):
        with Client(address, tls=tls, api_key="secret", retry=None) as client, pytest.raises(Unavailable):
            client.complete("hi")
        assert gateway.metadata == []


@pytest.mark.parametrize("who", [USER, STRANGER, None], ids=["the user", "a stranger", "nobody"])
def test_who_it_is_where_gateways_ask(who: tuple[bytes, bytes] | None) -> None:
    pem, key = who or (None, None)
    tls = Tls(SERVER[0], pem, key, server_name="gateway.test")
    with secured(asks=True) as (address, gateway), Client(address, tls=tls, retry=None) as client:
        if who is USER:
            assert client.complete("hi").text == TEXT
        else:
            with pytest.raises(Unavailable):
                client.complete("hi")
            assert gateway.asked == []
