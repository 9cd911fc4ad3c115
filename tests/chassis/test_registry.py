"""Registry entries survive the wire, and what is none is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from chassis.ids import BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages import registry as r
from chassis.wire import pipeline_pb2 as pb

BOOT = BootId("b00t")
WORKER = r.WorkerEntry(
    BOOT,
    "m",
    "d1",
    "h:1",
    "h:2",
    Epoch(2**63),
    True,
    30,
    preferred_stage=0,
    head_cost_layers=1.5,
    loaded=range(2, 9),
)
SPARE = r.WorkerEntry(BOOT, "m", "d1", "h:1", "h:2", Epoch(0), False, 30)


@pytest.mark.parametrize(
    ("entry", "build", "parse"),
    [
        (WORKER, r.build_worker, r.parse_worker),
        (SPARE, r.build_worker, r.parse_worker),
        (r.BatcherEntry(BOOT, "m", Epoch(7), True, "pool", 3, 4), r.build_batcher, r.parse_batcher),
        (r.KvstoreEntry(BOOT, "h:1"), r.build_kvstore, r.parse_kvstore),
        (r.GatewayEntry(BOOT, "h:1"), r.build_gateway, r.parse_gateway),
        (r.ModelEntry("m", "d1", "d2"), r.build_model, r.parse_model),
        (r.EpochEntry(Epoch(7), BOOT), r.build_epoch, r.parse_epoch),
    ],
)
def test_entries_come_back(
    entry: object, build: Callable[[Any], bytes], parse: Callable[[bytes], Any]
) -> None:
    assert parse(build(entry)) == entry


PARSERS = [r.parse_worker, r.parse_batcher, r.parse_kvstore, r.parse_gateway, r.parse_model, r.parse_epoch]


@pytest.mark.parametrize("parse", PARSERS)
def test_what_is_none_is_refused(parse: Callable[[bytes], Any]) -> None:
    for data in (b"", b"\xff\xff\xff", b"\x0a\x05ab"):
        with pytest.raises(BadMessage):
            parse(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loaded_first": 5, "loaded_end": 4},
        {"loaded_end": 31},
        {"preferred_stage": -2},
        {"head_cost_layers": -1.0},
        {"last_epoch": (1 << 64) - 1},  # nothing is above it
        {"head_cost_layers": float("nan")},
        {"head_cost_layers": float("inf")},
        {"head_cost_layers": 1.7e308},
        {"head_layers": 1.7e308},
        {"ends_layers": 2.1e6},
        {"ends_layers": -1.0},
        {"layer_us": 1e-310},  # time divided by it is none
        {"layer_us": 1.7e308},
        {"layer_us": -1.0},
        {"layer_us": float("nan")},
    ],
)
def test_impossible_workers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        r.parse_worker(pb.WorkerEntry(**{"boot": "b", "num_layers": 30, **wrong}).SerializeToString())
