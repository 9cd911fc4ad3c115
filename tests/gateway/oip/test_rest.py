"""Which path is whose, over REST: names with slashes, versions, and pages of other sites."""

import asyncio
from typing import Any

import orjson
import pytest
from starlette.routing import Match

from gateway.config import Config
from gateway.http_door import Door
from gateway.oip.rest import routes
from gateway.oip.rest_replies import StatisticsReply
from gateway.oip.server import Server
from tests.gateway.fake_front import FakeFront
from tests.gateway.oip.test_servicer import FakeControl
from tests.gateway.rig import run


def routes_of(front: FakeFront) -> Any:
    config = Config()
    return routes(Server(front, FakeControl(front), config), config)


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/v2/models/m", {"name": "m"}),
        ("/v2/models/org/m/infer", {"name": "org/m"}),
        ("/v2/models/org/m/versions/1", {"name": "org/m", "version": "1"}),
        ("/v2/models/m/versions/1/ready", {"name": "m", "version": "1"}),
        ("/v2/models/stats", {}),
        ("/v2/repository/models/org/m/load", {"name": "org/m"}),
    ],
)
def test_paths_name_models_and_versions(path: str, expected: dict[str, str]) -> None:
    async def main() -> None:
        method = "POST" if path.endswith(("infer", "load")) else "GET"
        scope: Any = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}}
        matches = [route.matches(scope) for route in routes_of(FakeFront())]
        assert [child["path_params"] for match, child in matches if match is Match.FULL][0] == expected

    run(main())


async def ask(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        if asked:
            await asyncio.Event().wait()
        asked.append(1)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asked: list[int] = []
    told = [(key.encode(), value.encode()) for key, value in headers.items()]
    scope: Any = {"type": "http", "method": method, "path": path, "root_path": "", "headers": told}
    scope |= {"query_string": b"", "scheme": "http", "server": ("h", 1)}
    await Door(routes_of(FakeFront()))(scope, receive, send)
    return sent[0]["status"], orjson.loads(b"".join(m.get("body", b"") for m in sent[1:]))


def test_refusals_have_the_protocols_shape() -> None:
    async def main() -> None:
        assert await ask("GET", "/v2/health/live") == (200, {"live": True})
        status, body = await ask("GET", "/v2/models/m", authorization="Bearer wrong")
        assert status == 401 and body["error"].startswith("authorization")
        status, body = await ask("GET", "/v2/models/nonsense")
        assert status == 404 and "nonsense" in body["error"]
        status, body = await ask("POST", "/v2/repository/models/m/unload", origin="http://evil", host="h")
        assert status == 403 and "origin" in body["error"]
        assert (await ask("GET", "/v2/models/m", origin="http://[evil", host="h"))[0] == 403
        lengthy = {"inference-header-content-length": "0" * 5000 + "2"}
        status, body = await ask("POST", "/v2/models/m/infer", b"{}", **lengthy)
        assert status == 400 and "inference-header-content-length" in body["error"]
        assert (await ask("POST", "/v2/repository/models/m/unload", origin="http://h", host="h"))[0] == 200
        status, body = await ask("POST", "/v2/models/m/infer", b"{}")
        assert (status, body) == (400, {"error": "request: inputs: a list of tensors"})
        status, body = await ask("POST", "/v2/systemsharedmemory/region/a/register", b"{}")
        assert status == 501
        status, body = await ask("GET", "/v2/models/m/stats")
        assert body["model_stats"][0]["inference_count"] == 12
        StatisticsReply.model_validate(body)
        assert await ask("GET", "/v2/models/a\nb") == (404, {"error": "there is nothing at /v2/models/a\nb"})
        assert await ask("PATCH", "/v2") == (
            405,
            {"error": "Method Not Allowed: /v2 takes GET, HEAD"},
        )
        status, body = await ask("GET", "/v2/models/nonsense/ready")
        assert status == 404 and "nonsense" in body["error"]

    run(main())
