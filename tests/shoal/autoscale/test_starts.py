"""How long a pipeline takes to come, as it is measured."""

from shoal.autoscale.starts import FIRST_GUESS_S, GIVEN_UP_S, Starts


def test_the_first_is_believed_and_later_ones_are_averaged() -> None:
    starts = Starts()
    assert starts.start_s == FIRST_GUESS_S
    starts.asked(100.0, 2)
    starts.saw(101.0, 0)
    assert starts.since(101.0) == 1.0
    starts.saw(104.0, 1)
    assert starts.start_s == 4.0 and starts.coming == 1
    starts.saw(114.0, 2)
    assert starts.start_s == 4.0 + 0.3 * 10.0 and starts.since(120.0) is None
    starts.check()


def test_what_was_there_already_measures_nothing() -> None:
    starts = Starts()
    starts.saw(0.0, 3)
    starts.saw(1.0, 3)
    starts.saw(2.0, 4)  # one was lost and came back: nobody had asked
    assert not starts.measured
    starts.asked(3.0)
    starts.saw(4.0, 4)
    assert starts.coming == 1 and not starts.measured


def test_what_is_not_wanted_any_more_is_not_waited_for() -> None:
    starts = Starts()
    starts.asked(0.0)
    starts.asked(5.0)
    starts.unasked()
    assert starts.since(6.0) == 6.0
    starts.unasked(5)
    assert starts.coming == 0


def test_one_that_never_comes_is_given_up() -> None:
    starts = Starts()
    starts.asked(0.0)
    starts.saw(GIVEN_UP_S, 0)
    assert starts.coming == 1
    starts.saw(GIVEN_UP_S + 1, 0)
    assert starts.coming == 0 and not starts.measured
