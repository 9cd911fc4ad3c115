"""What a gateway counts of its streams."""

import pytest

from chassis.errors import Code, Status
from chassis.metrics import render
from gateway import meters
from gateway.meters import Meters
from tests.chassis.test_metrics import parse


def told(m: Meters) -> dict[str, float]:
    return parse(render(m.families({"open": 2}, {"gap": 1})))


def test_a_stream_is_counted_once_with_its_times() -> None:
    m = Meters()
    m.ended("chat", "m", "stop", False, 1.0, 0.25, 16)
    m.ended("chat", "m", "UNAVAILABLE", True, 0.5, None, 0)
    samples = told(m)
    labels = 'gen_ai_operation_name="chat",gen_ai_request_model="m"'
    assert samples[f"gen_ai_server_request_duration_seconds_count{{{labels}}}"] == 1
    failed = f'{{{labels},error_type="UNAVAILABLE"}}'
    assert samples[f"gen_ai_server_request_duration_seconds_sum{failed}"] == 0.5
    assert samples[f"gen_ai_server_time_to_first_token_seconds_sum{{{labels}}}"] == 0.25
    assert samples[f"gen_ai_server_time_per_output_token_seconds_sum{{{labels}}}"] == pytest.approx(0.05)
    assert samples['shoal_gateway_streams_total{gen_ai_request_model="m",outcome="stop"}'] == 1
    assert samples["open"] == 2 and samples['shoal_gateway_events_total{event="gap"}'] == 1


def test_one_token_has_no_time_between() -> None:
    m = Meters()
    m.ended("chat", "m", "length", False, 0.3, 0.3, 1)
    assert not any("per_output_token" in name for name in told(m))


def test_what_is_refused_at_the_door_was_no_stream() -> None:
    m = Meters()
    with pytest.raises(Status), m.door():
        raise Status(Code.INVALID_ARGUMENT, "no")
    samples = told(m)
    assert samples['shoal_gateway_refused_total{error_type="INVALID_ARGUMENT"}'] == 1
    assert not any("streams_total" in name for name in samples)


def test_series_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "SERIES_MAX", 3)
    m = Meters()
    for i in range(9):
        m.ended("chat", f"m{i}", "stop", False, 1.0, 0.5, 4)
    m.ended("chat", "m0", "stop", False, 1.0, 0.5, 4)
    samples = told(m)
    assert samples['shoal_gateway_streams_total{gen_ai_request_model="m0",outcome="stop"}'] == 2
    assert sum(name.startswith("gen_ai_server_request_duration_seconds_count") for name in samples) == 3
