"""Follows what deploy/KUBERNETES.md has an operator type for guarding: `shoal init` and the Secrets."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.rendering import DEPLOY, ROOT, Container

PAGE = DEPLOY / "KUBERNETES.md"


@dataclass(frozen=True, slots=True)
class Guarded:
    """`key`: the first API key; `secrets`: by name, contents by key."""

    folder: Path
    key: str
    secrets: Mapping[str, Mapping[str, bytes]]


def followed(cwd: Path) -> Guarded:
    """Runs the page's commands there; what a cluster would keep is kept here."""
    (block,) = [
        b for b in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "init --secure" in b
    ]
    secrets: dict[str, dict[str, bytes]] = {}
    key = ""
    for line in block.splitlines():
        words = shlex.split(line)
        if words[0] == "kubectl":
            assert words[3:6] == ["create", "secret", "generic"], line
            files = [word.removeprefix("--from-file=") for word in words[7:]]
            pairs = [
                (name, path) if path else (Path(name).name, name)
                for name, _, path in (f.partition("=") for f in files)
            ]
            secrets[words[6]] = {name: (cwd / path).read_bytes() for name, path in pairs}
            continue
        command = line.replace(".venv/bin/shoal", f"{shlex.quote(sys.executable)} -m shoal")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PWD": str(cwd)}
        done = subprocess.run(["bash", "-ec", command], cwd=cwd, env=env, capture_output=True, check=True)
        key = key or done.stdout.decode().strip()
    return Guarded(cwd / "secrets", key, secrets)


def mounted(container: Container, secrets: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """The files that a pod has of Secrets. Raises KeyError for one that the page does not make."""
    found = {}
    for volume in container.pod["volumes"]:
        if "secret" in volume:
            (mount,) = [m for m in container.spec["volumeMounts"] if m["name"] == volume["name"]]
            for name, content in secrets[volume["secret"]["secretName"]].items():
                found[f"{mount['mountPath']}/{name}"] = content
    return found
