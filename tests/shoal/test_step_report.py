"""What `shoal bench` shows adds up, and says what the machine would allow beside it."""

import json
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.launcher import LaunchError, Plan
from shoal.ledger import Ledger, Row
from shoal.step_report import Asked, Line, Outside, _prompts, lines_of, outside_of, report, worker_times

POINT = {
    "sequences": 4,
    "context_len": 128,
    "step_us": 1000.0,
    "parts_us": {"products": 600.0, "attention": 100.0, "head": 200.0, "sampling": 60.0, "python": 40.0},
    "bounds_us": {"products": 300.0, "head": 150.0},
}
TOLD = {
    "bounds": {"threads": 2, "read_bytes_per_s": 20e9, "flops_per_s": {"float32": 150e9, "bfloat16": 300e9}},
    "points": [POINT],
}
OUTSIDE = Outside(step_us=3000.0, compute_us=2000.0, wait_us=100.0, ring_us=500.0, between_us=400.0)


def test_a_workers_step_alone() -> None:
    lines = lines_of(POINT, None)
    assert [line.name for line in lines][:2] == ["products of the layers", "attention"]
    assert sum(line.share for line in lines) == pytest.approx(1.0)
    assert lines[0] == Line("products of the layers", 600.0, 0.6, 300.0)


def test_the_whole_step_is_divided() -> None:
    """The worker's parts share what stages computed; the rest is what the ledger says."""
    lines = {line.name: line for line in lines_of(POINT, OUTSIDE)}
    assert sum(line.us for line in lines.values()) == pytest.approx(OUTSIDE.step_us)
    assert lines["products of the layers"].us == pytest.approx(1200.0)
    assert lines["transport and batcher"].share == pytest.approx(500 / 3000)


def test_the_ledgers_decode_rows_are_taken_and_no_others() -> None:
    rows = (
        Row("prefill", 9000),
        Row("compute", 8000, inner=True),
        Row("decode", 6300),
        Row("compute", 4200, inner=True),
        Row("stage wait", 210, inner=True),
        Row("ring", 1050, inner=True),
        Row("between steps", 840, inner=True),
        Row("finish", 100),
    )
    assert outside_of(Ledger(15400, rows, None, ()), 21) == Outside(300.0, 200.0, 10.0, 50.0, 40.0)


def test_without_steps_there_is_no_outside() -> None:
    assert outside_of(Ledger(100, (Row("decode", 100), Row("finish", 1)), None, ()), 10) is None
    assert outside_of(Ledger(100, (Row("gateway", 100),), None, ()), 10) is None


def test_the_report_names_rates_and_bounds() -> None:
    text = report(TOLD, {4: OUTSIDE})
    assert "20.0 GB/s of memory read, 150 GFLOP/s in float32, 300 GFLOP/s in bfloat16" in text
    assert "4 sequences, a step 3.00 ms (1.00 ms in a worker alone), 1333 tokens/s" in text
    products = next(line for line in text.splitlines() if "products of the layers" in line)
    assert products.split()[-3:] == ["1200", "40.0%", "300"]
    assert "transport and batcher" not in report(TOLD, {})


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(LaunchError, match="fake has no weights"):
        worker_times(Plan(model="fake"), Asked())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ('print(\'{"error": "no such file"}\')', "no such file"),
        ("import sys; sys.exit('killed by a test')", "code 1: killed by a test"),
    ],
)
def test_what_the_worker_says_is_told(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(LaunchError, match=why):
        worker_times(Plan(model=str(tmp_path)), Asked())


def test_the_command_asks_for_what_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Plan, Asked]] = []

    def times(plan: Plan, what: Asked) -> dict[str, object]:
        asked.append((plan, what))
        return dict(TOLD)

    monkeypatch.setattr("shoal.bench_words.worker_times", times)
    words = ["bench", "--worker-only", "--json", "--sequences", "4", "--dtype", "bfloat16", "--threads", "1"]
    words += ["--shared-len", "96"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["points"] == [POINT]
    ((plan, what),) = asked
    assert (plan.dtype, plan.threads, what.sequences, what.shared_len) == ("bfloat16", 1, (4,), 96)


@pytest.mark.parametrize("words", [["--sequences", "4,x"], ["--sequences", "0"], ["--output-tokens", "1"]])
def test_wrong_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 1
    assert "--sequences" in capsys.readouterr().err


def test_more_shared_than_there_is_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--context-len", "64", "--shared-len", "65"]) == 1
    assert "--shared-len" in capsys.readouterr().err


def test_prompts_differ_behind_what_they_share() -> None:
    one, other = _prompts(2, 40, 5000, 3, 24)
    assert one[:24] == other[:24] and one[24] != other[24]
    assert _prompts(2, 40, 5000, 3)[1][0] != one[0]
