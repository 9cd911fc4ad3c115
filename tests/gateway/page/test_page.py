"""The chat page as files and answers; what it does in a browser is for tests/e2e/test_page.py."""

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from gateway import page
from tests.gateway.http_client import ask
from tests.gateway.rig import run
from tests.gateway.test_http_door import door

FOLDER = Path(str(files(page)))
ASSETS = sorted(p.name for p in FOLDER.iterdir() if p.suffix in {".html", ".css", ".js", ".svg"})


def test_each_file_is_answered_and_kept_by_its_tag() -> None:
    async def life() -> None:
        async with door() as address:
            for name in ASSETS:
                path = "/" if name == "index.html" else f"/page/{name}"
                answer = await ask(address, "GET", path)
                assert (answer.status, answer.body) == (200, (FOLDER / name).read_bytes())
                assert "default-src 'none'" in answer.headers["content-security-policy"]
                assert answer.headers["x-content-type-options"] == "nosniff"
                tag = answer.headers["etag"]
                again = await ask(address, "GET", path, headers={"if-none-match": f'"x", W/{tag}'})
                assert (again.status, again.body) == (304, b"")
                other = await ask(address, "GET", path, headers={"if-none-match": '"x"'})
                assert other.status == 200
            for path in ("/page/", "/page/__init__.py", "/page/../__init__.py", "/page/%2e%2e/service.py"):
                assert (await ask(address, "GET", path)).status == 404
            assert (await ask(address, "POST", "/")).status == 405

    run(life())


def test_nothing_comes_from_elsewhere() -> None:
    """Each reference is to a file that is served, and there is no code or style inside the page."""
    html = (FOLDER / "index.html").read_text()
    served = {route.path for route in page.routes()}  # type: ignore[attr-defined]
    found = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert found and all(f in served or f.startswith("#") for f in found)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]+src=)", html)
    for name in ASSETS:
        text = (FOLDER / name).read_text()
        assert re.findall(r"https?://[^\s\"']+", text) in ([], ["http://www.w3.org/2000/svg"])
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|@import|url\(", text
        )


def test_the_policy_lets_in_only_what_is_ours() -> None:
    rules = dict(rule.split(" ", 1) for rule in page.POLICY.split("; "))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'none'", "'self'"}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_its_parts_read_what_comes() -> None:
    script = Path(__file__).with_name("parts.mjs")
    done = subprocess.run(["node", script, FOLDER], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
