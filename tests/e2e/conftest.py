"""What the end-to-end tests share: one loop, one calm deployment, a receiver of traces, measured stalls."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.collector import Collector, collecting
from tests.e2e.rig import Running, fake_plan, running


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as shared:
        yield shared


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="package")
def calm(
    runner: asyncio.Runner, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A deployment that nobody kills."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    with running(runner, fake_plan(tmp_path_factory.mktemp("calm"), gateways=2, env=env)) as shoal:
        yield shoal


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                for name, value in report.user_properties:
                    terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name} {value}")
