"""Units for machines without containers: systemd takes them, and services take what units tell them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal import nats_server
from tests.deploy.rendering import DEPLOY
from tests.deploy.settings import CONFIGS, config_of_toml, unknown_settings

UNITS = DEPLOY / "systemd"
SERVICES = {
    path.name.removeprefix("shoal-").partition("@")[0]: path for path in sorted(UNITS.glob("*@.service"))
}
INSTANCES = sorted((UNITS / "instances").glob("*.env"))
each = pytest.mark.parametrize("name", SERVICES)


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Sections, and in them every value of a key in order."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


def environment(path: Path) -> dict[str, str]:
    """Of a file that EnvironmentFile names."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def settings_of(instance: Path) -> tuple[str, dict[str, str], list[str]]:
    """The service, the whole environment of one instance, and the words that start it."""
    name, _, number = instance.stem.rpartition("-")
    said = unit(SERVICES[name])["Service"]
    env = dict(word.split("=", 1) for line in said["Environment"] for word in shlex.split(line))
    files = [line.removeprefix("-").replace("%i", number) for line in said["EnvironmentFile"]]
    assert files == ["/etc/shoal/shoal.env", f"/etc/shoal/{instance.name}"]
    env |= environment(UNITS / "shoal.env") | environment(instance)
    (start,) = said["ExecStart"]
    return name.replace("-", "_"), env, shlex.split(start)


def denies_new_code(service: str) -> bool:
    return unit(SERVICES[service.replace("_", "-")])["Service"].get("MemoryDenyWriteExecute") == ["true"]


def test_there_is_a_unit_for_each_service() -> None:
    """But for the autoscaler, whose numbers nobody would follow."""
    assert {name.replace("-", "_") for name in SERVICES} == set(CONFIGS) - {"autoscale"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_them(tmp_path: Path) -> None:
    """As they would lie, but for programs that are not installed here."""
    for path in UNITS.glob("shoal*.service"):
        text = re.sub(r"/opt/shoal/bin/[\w-]+", shutil.which("true") or "true", path.read_text())
        (tmp_path / path.name).write_text(text)
    shutil.copy(UNITS / "shoal.target", tmp_path)
    names = [f"shoal-{name}@0.service" for name in SERVICES] + ["shoal-nats.service", "shoal.target"]
    for name in names:
        if "@" in name:
            (tmp_path / name).symlink_to(name.replace("@0", "@"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *[str(tmp_path / name) for name in names]],
        capture_output=True,
        check=False,
        text=True,
    )
    ours = [line for line in done.stderr.splitlines() if "shoal" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@each
def test_it_is_not_much_exposed(name: str) -> None:
    """systemd's own count of what a unit leaves open: 10 is everything."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(SERVICES[name])],
        capture_output=True,
        check=False,
        text=True,
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found.group(1)) <= (3.0 if name == "shard-worker" else 2.0)


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.stem)
def test_services_take_their_settings(instance: Path) -> None:
    service, env, words = settings_of(instance)
    assert words[1:3] == ["-m", service] and words[3:] == ["--config", "/etc/shoal/shoal.toml"]
    assert unknown_settings(service, env) == []
    chassis, _ = config_of_toml(service, "", env)
    (stop,) = unit(SERVICES[service.replace("_", "-")])["Service"]["TimeoutStopSec"]
    assert float(stop) > chassis.drain_timeout_s


def test_instances_of_one_machine_share_no_port() -> None:
    ports = [
        match.group(1)
        for instance in INSTANCES
        for value in environment(instance).values()
        if (match := re.search(r":(\d+)$", value))
    ]
    assert len(ports) == len(set(ports)) >= len(INSTANCES)


@each
def test_wrong_settings_are_not_tried_for_ever(name: str) -> None:
    """Services end with 2 for those."""
    said = unit(SERVICES[name])
    assert said["Service"]["RestartPreventExitStatus"] == ["2"]
    assert said["Service"]["Restart"] == ["always"]
    assert said["Unit"]["PartOf"] == said["Install"]["WantedBy"] == ["shoal.target"]


def test_the_servers_configuration_is_one(tmp_path: Path) -> None:
    for path in (UNITS / "nats.conf", DEPLOY / "compose" / "nats.conf"):
        text = path.read_text()
        assert "sync_interval: always" in text
        mine = tmp_path / f"{path.parent.name}.conf"
        mine.write_text(re.sub(r'store_dir: "[^"]*"', f'store_dir: "{tmp_path}"', text))
        subprocess.run([nats_server.binary(), "-t", "-c", str(mine)], check=True, capture_output=True)
    (start,) = unit(UNITS / "shoal-nats.service")["Service"]["ExecStart"]
    assert start.split()[1:] == ["-c", "/etc/shoal/nats.conf"]
    (folder,) = unit(UNITS / "shoal-nats.service")["Service"]["StateDirectory"]
    assert f'store_dir: "/var/lib/{folder}"' in (UNITS / "nats.conf").read_text()


def test_what_the_page_enables_starts_with_the_machine() -> None:
    page = (DEPLOY / "SYSTEMD.md").read_text()
    (words,) = re.findall(r"^systemctl enable --now (.+)$", page, re.MULTILINE)
    wanted_by = {}
    for name in words.split():
        base = re.sub(r"@.*", "@", name)
        path = UNITS / (base if base.endswith(".target") else f"{base}.service")
        wanted_by[name] = unit(path)["Install"]["WantedBy"][0]
    for name in wanted_by:
        at = name
        while at in wanted_by:
            at = wanted_by[at]
        assert at == "multi-user.target", f"{name} waits for {at}, which nothing starts"
