"""OpenAI's API of a gateway, as far as the command needs it: plain HTTP/1.1 of the standard library.

A file goes out and comes in piece by piece. What failed for now is tried again by whoever waits.
"""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.client.errors import InvalidArgument, ShoalError, Unavailable

TIMEOUT_S = 60.0
PIECE_BYTES = 256 * 1024
BOUNDARY = "shoal-7d1f0c5be9a8432f"


class HttpApi:
    def __init__(self, url: str, api_key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """`url`: http(s)://host:port. Raises InvalidArgument."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument("INVALID_ARGUMENT", f"{url!r}: http://host:port or https://host:port")
        self._secure = parts.scheme == "https"
        self._place = (parts.hostname, parts.port or (443 if self._secure else 80))
        self._tls = tls
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> dict[str, Any]:
        """Raises ShoalError."""
        with self._asked("GET", path) as response:
            return _object(response.read())

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises ShoalError."""
        data = json.dumps(body or {}).encode()
        with self._asked("POST", path, data, {"content-type": "application/json"}) as response:
            return _object(response.read())

    def upload(self, file: Path) -> dict[str, Any]:
        """Raises ShoalError, OSError."""
        name = file.name.replace('"', "_")
        head = (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n'
            "content-type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{BOUNDARY}--\r\n".encode()
        with file.open("rb") as source:
            size = file.stat().st_size

            def body() -> Iterator[bytes]:
                yield head
                while piece := source.read(PIECE_BYTES):
                    yield piece
                yield tail

            headers = {
                "content-type": f"multipart/form-data; boundary={BOUNDARY}",
                "content-length": str(len(head) + size + len(tail)),
            }
            with self._asked("POST", "/v1/files", body(), headers) as response:
                return _object(response.read())

    def content(self, file_id: str) -> Iterator[bytes]:
        """Raises ShoalError, also when it ends too early."""
        with self._asked("GET", f"/v1/files/{file_id}/content") as response:
            while piece := response.read(PIECE_BYTES):
                yield piece

    @contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        host, port = self._place
        connection: http.client.HTTPConnection
        if self._secure:
            connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            try:
                connection.request(method, path, body, self._headers | (headers or {}))
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before it was sent whole: the answer says why
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            yield response
        except ssl.SSLError as error:
            raise Unavailable("UNAVAILABLE", f"{host}:{port}: {error.reason or error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable("UNAVAILABLE", f"{host}:{port}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _refused(response: http.client.HTTPResponse) -> ShoalError:
    try:
        message = str(_object(response.read(PIECE_BYTES))["error"]["message"])
    except (ShoalError, KeyError, TypeError):
        message = response.reason
    if response.status in (429, 503):
        return Unavailable("UNAVAILABLE", message)
    return ShoalError(f"HTTP {response.status}", message)


def _object(data: bytes) -> dict[str, Any]:
    try:
        given = json.loads(data)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise Unavailable("UNAVAILABLE", "the answer is not a JSON object: is that a gateway?")
    return given
