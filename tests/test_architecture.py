"""What of the house style a machine can keep. Exceptions are listed here with their reason, and only here."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("gateway", "batcher", "kvstore", "shard_worker")
PACKAGES = ("chassis", *SERVICES, "shoal")
WIRE = ROOT / "chassis" / "wire"

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
LONG_FILES: dict[str, str] = {
    "batcher/events.py": "the whole vocabulary of the batcher, read from top to bottom",
}
LONG_FUNCTIONS: dict[str, str] = {}

# who may import a library, as path patterns
GATEKEEPERS: dict[str, tuple[str, ...]] = {
    "nats": (r"chassis/nats_(bus|client)\.py", r"chassis/jetstream\.py"),
    "grpc": (
        r"chassis/grpc_rpc\.py",
        r"chassis/otlp\.py",
        r"\w+/(oip/)?servicer\.py",
        r"shoal/client/\w+\.py",
    ),
    "grpc_health": (r"\w+/servicer\.py", r"shoal/client/\w+\.py"),
    "grpc_reflection": (r"\w+/servicer\.py",),
    "torch": (r"shard_worker/.*",),
    "gguf": (r"shard_worker/.*",),
    "safetensors": (r"shard_worker/.*",),
    "llguidance": (r"chassis/grammars\.py",),
    "nixl_cu12": (r"chassis/transport/nixl_agent\.py",),
    "opentelemetry": (r"chassis/trace\w*\.py", r"chassis/otlp\.py", r"chassis/metrics\.py"),
    "uvloop": (r"chassis/service\.py",),
}
# generated messages are built and parsed in one place per proto
WIRE_USERS = (r"chassis/messages/.*", r"chassis/wire/.*", r"\w+/servicer\.py", r"shoal/client/\w+\.py")
WIRE_EXCEPTIONS: dict[str, str] = {}

IMPURE = {"asyncio", "time", "random", "secrets", "os", "socket", "threading", "uuid", "subprocess"}
IMPURE |= {"multiprocessing", "concurrent", "signal", "pathlib", "tempfile", "selectors"}
PURE_CHASSIS = {"chassis.ids", "chassis.errors", "chassis.messages"}
INTERFACES = {"chassis.bus", "shard_worker.executor"}  # value types and protocols: nothing in them acts
PURE_LIBRARIES = {"numpy", "orjson", "xxhash", "pydantic"}

CLI_FILES = ("shoal/cli.py",)


@cache
def sources() -> tuple[Path, ...]:
    """Every hand-written file of the packages."""
    return tuple(
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if WIRE not in path.parents
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, the lazy ones too; `from a import b` is `a` and `a.b`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def is_pure(path: Path) -> bool:
    return (ast.get_docstring(tree(path)) or "").startswith("Pure.")


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name_of(path)) for pattern in patterns)


def report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


# who may import what the arrows forbid
ARROW_EXCEPTIONS: dict[str, str] = {
    "shoal/single.py": "puts all services into one process; imported only when that is asked for",
}


def test_arrows_point_one_way() -> None:
    """chassis <- each service; services never import each other; shoal imports no service."""
    allowed = {"chassis": {"chassis"}, "shoal": {"chassis", "shoal"}} | {s: {"chassis", s} for s in SERVICES}
    report(
        [
            f"{name_of(path)}:{line}: imports {module}"
            for path in sources()
            if name_of(path) not in ARROW_EXCEPTIONS
            for line, module in imports(path)
            if (top := module.split(".")[0]) in (*PACKAGES, "tests", "bench")
            and top not in allowed[path.relative_to(ROOT).parts[0]]
        ]
    )


def test_services_are_composed_lazily() -> None:
    """What may import all services is itself imported inside a function only."""
    modules = {name.removesuffix(".py").replace("/", ".") for name in ARROW_EXCEPTIONS}
    found = []
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ImportFrom) and modules & {node.module, *_imported(node)}:
                found.append(f"{name_of(path)}:{node.lineno}: imports {node.module} when it is imported")
            if isinstance(node, ast.Import) and modules & {alias.name for alias in node.names}:
                found.append(f"{name_of(path)}:{node.lineno}: imports it when it is imported")
    report(found)


def _imported(node: ast.ImportFrom) -> set[str]:
    return {f"{node.module}.{alias.name}" for alias in node.names}


def test_each_library_has_its_gatekeeper() -> None:
    report(
        [
            f"{name_of(path)}:{line}: imports {module}"
            for path in sources()
            for line, module in imports(path)
            if (top := module.split(".")[0]) in GATEKEEPERS and not matches(path, GATEKEEPERS[top])
        ]
    )


def test_messages_have_one_home() -> None:
    report(
        [
            f"{name_of(path)}:{line}: imports {module}"
            for path in sources()
            for line, module in imports(path)
            if module.startswith("chassis.wire")
            and not matches(path, WIRE_USERS)
            and name_of(path) not in WIRE_EXCEPTIONS
        ]
    )


def test_pure_files_import_only_what_is_pure() -> None:
    by_module = {module_of(path): path for path in sources()}
    found = []
    for path in sources():
        if not is_pure(path):
            continue
        for line, module in imports(path):
            top = module.split(".")[0]
            if top in PACKAGES:
                target = by_module.get(module) or by_module.get(module.rpartition(".")[0])
                fine = (target is not None and is_pure(target)) or any(
                    module == m or module.startswith(m + ".") for m in PURE_CHASSIS | INTERFACES
                )
                fine |= module.startswith("chassis.wire") and matches(path, WIRE_USERS)
            elif top in sys.stdlib_module_names:
                fine = top not in IMPURE
            else:
                fine = top in PURE_LIBRARIES or (top == "google" and matches(path, WIRE_USERS))
            if not fine:
                found.append(f"{name_of(path)}:{line}: is pure but imports {module}")
    report(found)


def test_pure_files_decide_by_nothing_that_changes_between_runs() -> None:
    """No hash(), no id(), no await, no walk over a set written in place."""
    found = []
    for path in sources():
        if not is_pure(path):
            continue
        for node in ast.walk(tree(path)):
            line = getattr(node, "lineno", 0)
            match node:
                case ast.Call(func=ast.Name(id="hash" | "id" as called)):
                    found.append(f"{name_of(path)}:{line}: is pure but calls {called}()")
                case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                    found.append(f"{name_of(path)}:{line}: is pure but awaits")
                case ast.For(
                    iter=ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset"))
                ):
                    found.append(f"{name_of(path)}:{line}: walks over a set")
    report(found)


def test_chance_and_clocks_come_from_outside() -> None:
    """Shells ask the loop and the ports; only these files know the real sources."""
    homes = (
        r"chassis/(ids_source|log|service|trace)\.py",
        r"shoal/.*",
        r"shard_worker/(__main__|bounds|card|fake_model|step_times|torch_executor|native/build)\.py",
    )
    calls = {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"}
    found = []
    for path in sources():
        if matches(path, homes):
            continue
        for line, module in imports(path):
            if module.split(".")[0] in ("random", "secrets", "uuid"):
                found.append(f"{name_of(path)}:{line}: imports {module}")
        for node in ast.walk(tree(path)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=attr)) if attr in calls:
                    found.append(f"{name_of(path)}:{node.lineno}: calls time.{attr}()")
    report(found)


def test_tasks_belong_to_a_group() -> None:
    """No bare create_task or ensure_future: a child's crash is the service's crash."""
    found = []
    for path in sources():
        if name_of(path).startswith("shoal/"):
            continue  # the launcher holds its children itself
        for node in ast.walk(tree(path)):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id="asyncio" | "loop"), attr="create_task" | "ensure_future"
                    )
                ):
                    if name_of(path) not in TASK_EXCEPTIONS:
                        found.append(f"{name_of(path)}:{node.lineno}: a task outside a group")
    report(found)


TASK_EXCEPTIONS: dict[str, str] = {}


def test_files_say_why_they_exist() -> None:
    report(
        [
            f"{name_of(path)}: has no docstring"
            for path in sources()
            if path.name != "__main__.py" and path.read_text().strip() and not ast.get_docstring(tree(path))
        ]
    )


def test_files_and_functions_stay_small() -> None:
    found = []
    for path in sources():
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > FILE_LINES_MAX and name_of(path) not in LONG_FILES:
            found.append(f"{name_of(path)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX and f"{name_of(path)}:{node.name}" not in LONG_FUNCTIONS:
                    found.append(f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines")
    report(found)


def test_exceptions_are_needed() -> None:
    """A list of exceptions that outlives them would hide the next one."""
    found = [f"{name}: is short by now" for name in LONG_FILES if _lines(ROOT / name) <= FILE_LINES_MAX]
    for entry in LONG_FUNCTIONS:
        name, _, function = entry.partition(":")
        lengths = [
            (node.end_lineno or 0) - node.lineno + 1
            for node in ast.walk(tree(ROOT / name))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        ]
        if not any(length > FUNCTION_LINES_MAX for length in lengths):
            found.append(f"{entry}: is short by now")
    report(found)


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_nothing_has_no_name() -> None:
    nameless = re.compile(r"utils?|common|helpers?|misc|base_.*|shared|lib")
    found = [name_of(path) for path in sources() if nameless.fullmatch(path.stem)]
    for path in sources():
        found += [
            f"{name_of(path)}:{node.lineno}: class {node.name}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ClassDef) and node.name.endswith("Manager")
        ]
    report(found)


def test_only_the_command_prints() -> None:
    found = []
    for path in sources():
        for node in ast.walk(tree(path)):
            match node:
                case ast.Call(func=ast.Name(id="print")) if name_of(path) not in CLI_FILES:
                    found.append(f"{name_of(path)}:{node.lineno}: prints")
    report(found)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_nothing_is_left_undone_or_tied_to_one_machine() -> None:
    """No marks of unfinished work, no path of somebody's machine."""
    unwanted = re.compile(
        r"\bTODO\b|\bFIXME\b|\bXXX\b|raise NotImplementedError|/(?:work|farm|home|root|Users|tmp)/[a-z]"
    )
    found = []
    for path in tracked():
        if path.suffix in {".png", ".svg"} or WIRE in path.parents or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := unwanted.search(line):
                found.append(f"{name_of(path)}:{number}: {match.group()}")
    report(found)


def test_every_package_is_in_the_distribution() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == present


def test_the_wire_is_fresh(tmp_path: Path) -> None:
    """chassis/wire is what `make proto` makes of proto/."""
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "proto").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ichassis/wire=proto", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "chassis" / "wire").iterdir()}
    kept = {path.name: path.read_bytes() for path in WIRE.glob("*_pb2*.py*") if path.is_file()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []


SUBJECT_HOMES = tuple(
    f"chassis/{name}.py"
    for name in ("subjects", "job_subjects", "batch_layout", "batch_subjects", "bus_rights")
)


def test_every_bus_address_is_built_in_one_place() -> None:
    subject = re.compile(
        r"""(?<!b)["']shoal\.(req|res|tok|takeover|own|bat|keep|trace|dead|kv|kvask|job|ans)\b"""
        r"""|(?<!b)["']shoal\.(file|piece|batch|drive)\b"""
    )
    report(
        [
            f"{name_of(path)}:{number}: {line.strip()}"
            for path in sources()
            if name_of(path) not in SUBJECT_HOMES
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if subject.search(line)
        ]
    )
