"""Every dependency runs on a small machine: the list of its wheels is whole, and each fits there."""

import re
from pathlib import Path

from bench.arm64_wheels import HEAD, LIST, PINS, PYTHON, pins

ABIS = (f"cp{PYTHON.replace('.', '')}", "abi3", "none")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed() -> dict[str, str]:
    """Pin to wheel."""
    text = LIST.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    pairs = [line.split(" ") for line in text.removeprefix(HEAD).splitlines()]
    return {f"{normal(pin.partition('==')[0])}=={pin.partition('==')[2]}": wheel for pin, wheel in pairs}


def test_the_list_is_of_what_is_pinned() -> None:
    """After a change of constraints.txt it is made anew."""
    wanted = {f"{normal(name)}=={version}" for name, version in (pin.split("==") for pin in pins())}
    assert set(listed()) == wanted and len(wanted) > 50, (
        f"{PINS.name} has changed: python -m bench.arm64_wheels"
    )


def test_each_wheel_is_of_its_pin_and_fits() -> None:
    for pin, wheel in listed().items():
        assert wheel.endswith(".whl"), wheel
        name, version, *_, python, abi, platforms = Path(wheel).stem.split("-")
        name = f"{normal(name)}=={version.partition('+')[0].replace('%2B', '')}"
        assert name == pin, f"{pin}: {wheel}"
        assert abi.split(".")[0] in ABIS, f"{pin}: {wheel}"
        fits = platforms == "any" or any(
            p.startswith("manylinux") and p.endswith("_aarch64") for p in platforms.split(".")
        )
        assert fits, f"{pin}: {wheel}"
        assert any(tag.startswith(("py3", "cp3")) for tag in python.split(".")), f"{pin}: {wheel}"
