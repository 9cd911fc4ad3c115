"""Steps in flight: numbers, order, deadlines."""

import pytest

from batcher.inflight import InFlight
from chassis.ids import Epoch


def make(steps_max: int = 2) -> InFlight[str]:
    flights: InFlight[str] = InFlight(deadline_min_s=5.0, deadline_factor=8.0)
    flights.open(Epoch(3), steps_max)
    return flights


def send(flights: InFlight[str], now: float, *rows: str, predicted_s: float = 0.0) -> int:
    number = flights.send(rows, len(rows), len(rows), now, predicted_s, decodes=bool(rows))
    flights.check(512)
    return number


def test_numbers_have_no_gaps_and_start_anew() -> None:
    flights = make()
    assert [send(flights, 0.0, "a"), send(flights, 0.0, "b")] == [1, 2]
    assert flights.full
    assert flights.returned(1, 1, 0.5) is not None
    assert send(flights, 1.0, "a") == 3
    flights.void()
    flights.open(Epoch(4), 1)
    assert send(flights, 2.0, "a") == 1
    assert flights.full


def test_an_epoch_comes_once() -> None:
    flights = make()
    with pytest.raises(AssertionError, match="epoch"):
        flights.open(Epoch(3), 1)


@pytest.mark.parametrize(("number", "num_tokens"), [(2, 1), (0, 1), (1, 0), (1, 2)])
def test_what_is_not_due_is_refused(number: int, num_tokens: int) -> None:
    flights = make()
    send(flights, 0.0, "a")
    send(flights, 0.0, "b")
    assert flights.returned(number, num_tokens, 0.1) is None
    assert flights.stats.wrong == 1 and len(flights) == 2
    flights.check(512)


def test_nothing_is_due_when_nothing_is_in_flight() -> None:
    assert make().returned(1, 0, 0.0) is None


def test_the_flight_tells_what_it_carried_and_what_it_cost() -> None:
    flights = make()
    send(flights, 1.0, "a", "b")
    send(flights, 1.1, "c")
    first = flights.returned(1, 2, 2.0)
    second = flights.returned(2, 1, 2.25)
    assert first is not None and second is not None
    assert (first[0].rows, first[1]) == (("a", "b"), 1.0)
    assert (second[0].rows, second[1]) == (("c",), 0.25)  # it waited for the first
    assert flights.stats.round_trip_s == pytest.approx(2.15)
    assert flights.histogram == {2: 1, 1: 1}
    assert flights.num_decoding == 0


def test_the_deadline_counts_from_when_the_step_could_run() -> None:
    flights = make()
    assert flights.deadline() is None
    send(flights, 1.0, "a")
    send(flights, 1.0, "b", predicted_s=2.0)
    assert flights.deadline() == 6.0  # the floor
    flights.returned(1, 1, 4.0)
    assert flights.deadline() == 20.0  # 8 times what was predicted, from when the one before came back


def test_void_names_all_in_order() -> None:
    flights = make()
    send(flights, 0.0, "a")
    send(flights, 0.0, "b")
    assert [flight.rows for flight in flights.void()] == [("a",), ("b",)]
    assert len(flights) == 0 and flights.num_decoding == 0 and flights.stats.voided == 2
    flights.check(512)
