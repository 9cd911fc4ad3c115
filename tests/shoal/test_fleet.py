"""Who joins and who leaves, by what is wanted."""

import pytest

from shoal.fleet import BadCount, Fleet, wanted_of


def fleet(stages: int = 2, **counts: int) -> Fleet:
    made = Fleet()
    for kind, count in counts.items():
        for _ in range(count):
            made.join(kind, stages)  # type: ignore[arg-type]
    return made


def names(made: Fleet) -> list[str]:
    return [m.name for kind in ("gateway", "batcher", "worker", "spare", "kvstore") for m in made.of(kind)]


def test_names_of_what_joins() -> None:
    made = fleet(kvstore=1, pipeline=1, spare=1, batcher=1, gateway=2)
    assert names(made) == [
        "gateway", "gateway-1", "batcher", "batcher-1", "worker-0", "worker-1", "spare-0", "kvstore"
    ]  # fmt: skip
    assert made.counts() == {"gateways": 2, "pipelines": 1, "spares": 1, "kvstores": 1}
    joined = made.join("pipeline", 2, ("--threads", "2"))
    assert [m.name for m in joined] == ["worker-2", "worker-3", "batcher-2"]
    assert joined[1].flags == ("--preferred-stage", "1", "--threads", "2") and joined[2].flags == ()
    assert {m.pipeline for m in joined} == {"batcher-2"}
    assert [m.name for m in made.of("pipeline")] == ["batcher", "batcher-2"]  # one stands by


def test_a_name_that_was_left_is_given_again() -> None:
    made = fleet(gateway=3)
    made.leave("gateway-1")
    assert made.join("gateway", 1)[0].name == "gateway-1"


def test_what_is_missing_and_who_is_too_many() -> None:
    made = fleet(kvstore=1, pipeline=2, spare=2, gateway=2)
    wanted = {"kvstores": 2, "pipelines": 1, "spares": 0, "gateways": 3}
    assert made.missing(wanted) == ["kvstore", "gateway"]
    assert made.surplus(wanted) == ["batcher-1", "spare-1", "spare-0"]
    assert made.missing({}) == [] and made.surplus({}) == []
    assert made.surplus({"gateways": 1}) == ["gateway-1"]
    assert made.surplus({"spares": 1}, ["spare-1"]) == ["spare-0"]
    assert made.surplus({"spares": 0}, ["spare-1"]) == ["spare-0", "spare-1"]


def test_a_pipeline_takes_idle_workers_along_others_if_its_own_are_in_use() -> None:
    made = fleet(pipeline=2)
    assert [m.name for m in made.lend(["worker-2", "worker-3"], "batcher-1")] == ["worker-2", "worker-3"]
    going = made.lend(["worker-0", "worker-3"], "batcher-1")
    assert [m.name for m in going] == ["worker-3", "worker-0"]
    for member in going:
        made.leave(member.name)
    made.leave("batcher-1")
    assert [m.name for m in made.workers_of("batcher")] == ["worker-1", "worker-2"]


def test_where_too_few_are_idle_its_own_go() -> None:
    made = fleet(pipeline=2)
    assert [m.name for m in made.lend(["worker-2"], "batcher-1")] == ["worker-2", "worker-3"]
    assert [m.name for m in made.lend([], "batcher-1")] == ["worker-2", "worker-3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"gateway": 1}, "gateway: unknown; known are gateways, pipelines, spares, kvstores"),
        ({"gateways": 0}, "gateways: 0; a number from 1 to 64"),
        ({"kvstores": 65}, "kvstores: 65; a number from 1 to 64"),
        ({"pipelines": -1}, "pipelines: -1; a number from 0 to 64"),
        ({"spares": True}, "spares: True"),
        ({"spares": "2"}, "spares: '2'"),
        ({"spares": 1.0}, "spares: 1.0"),
    ],
)
def test_numbers_that_are_refused(words: dict[str, object], said: str) -> None:
    with pytest.raises(BadCount) as refused:
        wanted_of(words)
    assert str(refused.value).startswith(said)
