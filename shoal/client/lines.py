"""The ways to gateways: addresses, credentials, and which gateway is asked now.

All calls go to one gateway until it fails, then to the next: a stream goes on wherever it is resumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from chassis.wire import gateway_pb2_grpc as pb_grpc
from shoal.client.errors import Cancelled, InvalidArgument, ShoalError, error_of

DEFAULT_ADDRESS = "127.0.0.1:50051"
OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the one that notices a frozen gateway
    # a gateway that starts again is found within a second, not within two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # in fact the patience with a connection that opens
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes. Without `root_certificates` the usual ones are trusted; `certificate` and `private_key` say
    who the client is, where gateways ask (mTLS); `server_name`: in their certificate, if not the address."""

    root_certificates: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidArgument("INVALID_ARGUMENT", "tls: certificate and private_key belong together")

    @classmethod
    def of_files(
        cls,
        root_certificates: Path | str | None = None,
        certificate: Path | str | None = None,
        private_key: Path | str | None = None,
        server_name: str = "",
    ) -> "Tls":
        """Raises OSError."""
        return cls(_bytes(root_certificates), _bytes(certificate), _bytes(private_key), server_name)


class Lines:
    """Channels to all addresses. Which is asked now is one number: a race costs a failed try, no more."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        api_key: str,
        tls: Tls | bool,
        plain: Callable[..., Any],
        secure: Callable[..., Any],
    ) -> None:
        """`plain`, `secure`: what makes a channel. Raises InvalidArgument."""
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses or not all(self.addresses):
            raise InvalidArgument("INVALID_ARGUMENT", "address: at least one, none of them empty")
        self.metadata = _metadata(api_key)
        if tls:
            options, credentials = _credentials(Tls() if tls is True else tls)
            self.channels = [secure(a, credentials, options=(*OPTIONS, *options)) for a in self.addresses]
        else:
            self.channels = [plain(address, options=OPTIONS) for address in self.addresses]
        self._stubs = [pb_grpc.InferenceStub(channel) for channel in self.channels]  # type: ignore[no-untyped-call]
        self._now = 0
        self.closed = False  # before the channels are

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def now(self) -> int:
        return self._now

    def stub(self, index: int) -> Any:
        """Raises Cancelled: a channel that is closed would raise what is no ShoalError."""
        if self.closed:
            raise Cancelled("CANCELLED", "the client is closed")
        return self._stubs[index]

    def failed(self, index: int) -> None:
        if self._now == index:
            self._now = (index + 1) % len(self.addresses)


def _bytes(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise InvalidArgument("INVALID_ARGUMENT", "api_key: printable ASCII without spaces")
    return (("authorization", f"Bearer {api_key}"),)


def _credentials(tls: Tls) -> tuple[tuple[tuple[str, str], ...], Any]:
    credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate)
    options = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return options, credentials


def error_from(error: Any, request_id: str = "") -> ShoalError:
    """Of a failed call."""
    hints = [value for key, value in error.trailing_metadata() or () if key == "retry-after-ms"]
    retry_ms = int(hints[0]) if hints and str(hints[0]).isdigit() else None
    return error_of(error.code().name, error.details() or "", retry_ms, request_id)
