"""What was measured is kept, and measured again where the machine was busy."""

import json

import pytest

from specjax.measurements import MOST_TRIES, Measured, measured_once


def test_what_was_measured_in_peace_is_not_measured_again(tmp_path):
    file = tmp_path / "new" / "folder.json"
    assert measured_once(file, "steps", lambda: Measured({1: 2.5}, steady=True)) == {"1": 2.5}
    assert measured_once(file, "steps", lambda: pytest.fail("measured again")) == {"1": 2.5}
    assert measured_once(file, "passes", lambda: Measured([3.0], steady=True)) == [3.0]
    assert len(json.loads(file.read_text())) == 2


def test_a_busy_machine_is_asked_again_and_the_least_holds(tmp_path):
    file = tmp_path / "kept.json"
    found = [{1: 5.0, 2: 7.0}, {1: 6.0, 2: 6.5}, {1: 9.0, 2: 9.0}]
    values = [measured_once(file, "steps", lambda value=value: Measured(value, steady=False)) for value in found]
    assert values == [{"1": 5.0, "2": 7.0}, {"1": 5.0, "2": 6.5}, {"1": 5.0, "2": 6.5}]
    assert len(found) == MOST_TRIES
    assert measured_once(file, "steps", lambda: pytest.fail("measured too often")) == values[-1]


def test_a_moment_of_peace_is_enough(tmp_path):
    file = tmp_path / "kept.json"
    measured_once(file, "steps", lambda: Measured([5.0], steady=False))
    assert measured_once(file, "steps", lambda: Measured([4.0], steady=True)) == [4.0]
    assert measured_once(file, "steps", lambda: pytest.fail("measured again")) == [4.0]


def test_processes_take_the_first_ones_value(tmp_path):
    told = iter([None, ([1.0], True)])
    assert measured_once(tmp_path / "a", "steps", lambda: Measured([2.0], steady=True), lambda own: next(told)) == [1.0]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"%s": 3}', '{"%s": {"value": 3}}'])
def test_a_file_of_another_form_is_written_anew(tmp_path, text):
    file = tmp_path / "kept.json"
    measured_once(file, "steps", lambda: Measured(1.0, steady=True))
    (here,) = json.loads(file.read_text())
    file.write_text(text.replace("%s", here))
    assert measured_once(file, "steps", lambda: Measured(2.0, steady=True)) == 2.0
    assert measured_once(file, "steps", lambda: pytest.fail("measured again")) == 2.0


def test_a_folder_that_cannot_be_written_costs_a_measurement(tmp_path):
    (tmp_path / "file").write_text("")
    for value in (1.0, 2.0):
        assert measured_once(tmp_path / "file" / "kept.json", "steps", lambda value=value: Measured(value, steady=True)) == value
