"""`python -m bench.arm64_wheels`: asks the package index which wheel each pin has on Linux for ARM64.

Writes `deploy/arm64-wheels.txt`, a line a pin of `constraints.txt`, which a test holds against both. pip
does the asking, as it would on such a machine: nothing is installed, and a pin without a wheel is an error.
What only `[cuda]` and `[rdma]` need is pinned elsewhere or named in `ELSEWHERE`.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
LIST = ROOT / "deploy" / "arm64-wheels.txt"
PYTHON = "3.11"
ELSEWHERE = ("nixl-cu12",)  # of the extra `rdma`
GLIBC = ("2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35")
HEAD = "# Wheels for Linux on ARM64 of what constraints.txt pins. Made by: python -m bench.arm64_wheels\n"


def pins() -> list[str]:
    """`name==version` of each."""
    lines = [line.partition("#")[0].strip() for line in PINS.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and line.partition("==")[0] not in ELSEWHERE]


def main() -> int:
    with TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "pins.txt", Path(folder) / "report.json"
        wanted.write_text("\n".join(pins()))
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"),
            *("--no-deps", "--only-binary=:all:", "--target", folder, "--report", str(report)),
            *("--implementation=cp", f"--python-version={PYTHON}", f"--abi=cp{PYTHON.replace('.', '')}"),
            *("--abi=abi3", "--abi=none", *(f"--platform=manylinux{glibc}_aarch64" for glibc in GLIBC)),
            *("-r", str(wanted)),
        ]
        if subprocess.run(command, check=False).returncode:
            return 1
        found = json.loads(report.read_text())["install"]
    lines = []
    for item in found:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        lines.append(f"{name}=={version} {item['download_info']['url'].rpartition('/')[2]}\n")
    LIST.write_text(HEAD + "".join(sorted(lines, key=str.lower)), encoding="utf-8")
    sys.stdout.write(f"{len(lines)} wheels in {LIST.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
