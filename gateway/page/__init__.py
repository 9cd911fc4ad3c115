"""The chat page at `/`: three files of this package, which speak OpenAI's HTTP API of the same address.

Nothing comes from anywhere else, and the page says so to the browser: what a model writes cannot load, run or
send anything.
"""

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "prose.js": "text/javascript; charset=utf-8",
    "fish.svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # asked for each time, sent when it has changed
}


def routes() -> list[BaseRoute]:
    return [_route("/" if name == "index.html" else f"/page/{name}", name) for name in _KINDS]


def _route(path: str, name: str) -> Route:
    data = files(__name__).joinpath(name).read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**_HEADERS, "content-type": _KINDS[name], "etag": tag}

    async def answer(request: Request) -> Response:
        known = [t.strip().removeprefix("W/") for t in request.headers.get("if-none-match", "").split(",")]
        if tag in known:
            return Response(None, 304, headers)
        return Response(data, 200, headers)

    return Route(path, answer)
