"""Timing in turns, by a clock that the test sets."""

from specjax.benchmark.clock import Spread, in_turns, turns


class Clock:
    """Tells the time that was set; runs let it go on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def takes(self, *seconds):
        """A run that takes these seconds, one after the other; preparing it takes an hour."""
        left = list(seconds)

        def prepare():
            self.now += 3600

            def run():
                self.now += left.pop(0)

            return run

        return prepare


def test_runs_are_timed_in_turns_without_their_preparation_and_the_first_time():
    clock = Clock()
    found = in_turns({"a": clock.takes(9, 1, 2), "b": clock.takes(8, 5, 7)}, 2, clock)
    assert found == {"a": [1, 2], "b": [5, 7]}


def test_each_is_first_in_some_repeat():
    order = list(turns("abc", 4))
    assert [name for repeat, name in order if repeat == 1] == ["b", "c", "a"]
    assert [name for repeat, name in order if repeat == 3] == ["a", "b", "c"]
    assert list(turns([], 2)) == []


def test_median_and_spread():
    assert Spread.of([4.0, 1.0, 2.0, 8.0]) == (3.0, 1.0, 8.0)
