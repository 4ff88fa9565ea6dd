"""A window plan as a value and as a file: round trips, damage, and files of something else."""

import json
import os

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import TrafficProfile, WindowPlan, greedy_windows

MODEL = "5f" * 32
PLAN = WindowPlan(((3, 0), (12, 7), (1, 1)), MODEL, 16)


def load(path, **changed):
    return WindowPlan.load(path, **{"model": MODEL, "page_size": 16} | changed)


@pytest.fixture
def path(tmp_path):
    where = tmp_path / "plans" / "smollm.json"
    PLAN.save(where)
    return where


def test_a_plan_comes_back_and_is_a_value(path):
    assert load(path) == PLAN
    assert hash(load(path)) == hash(PLAN)
    assert PLAN.total == 24
    assert PLAN.array.dtype == np.int32
    assert PLAN.array.tolist() == [[3, 0], [12, 7], [1, 1]]
    assert load(str(path)) == PLAN


def test_solved_windows_become_a_plan(tmp_path):
    solved = greedy_windows(TrafficProfile(np.random.default_rng(0).random((3, 2, 4)), range(4)), 9)
    plan = WindowPlan.of(solved, MODEL, np.int64(16))
    plan.save(tmp_path / "plan")
    np.testing.assert_array_equal(load(tmp_path / "plan").array, solved)


def test_saving_replaces_and_leaves_nothing_else(path):
    WindowPlan(((1,),), MODEL, 16).save(path)
    assert load(path).slots == ((1,),)
    assert os.listdir(path.parent) == [path.name]


def test_the_file_says_what_it_is(path):
    said = json.loads(path.read_text())
    assert (said["magic"], said["version"]) == ("kvjax window plan", 1)
    assert said["body"] == {"slots": [[3, 0], [12, 7], [1, 1]], "model": MODEL, "page_size": 16}


def test_another_models_and_another_page_sizes_plan_are_refused(path):
    with pytest.raises(KvjaxError, match=r"smollm.json is for model 5f5f5f5f5f5f, .*is ab12"):
        load(path, model="ab12" * 16)
    with pytest.raises(KvjaxError, match=r"smollm.json is for pages of 16 tokens, .* hold 32"):
        load(path, page_size=32)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(KvjaxError, match=r"nothing.json does not exist: give the path"):
        load(tmp_path / "nothing.json")


def test_every_shorter_file_is_refused(path):
    data = path.read_bytes()
    for length in range(len(data) - 1):  # the last byte is a line end
        path.write_bytes(data[:length])
        with pytest.raises(KvjaxError, match=r"smollm.json is torn"):
            load(path)


def test_no_changed_bit_changes_the_plan_unnoticed(path):
    data = path.read_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            plan = load(path)
        except KvjaxError as error:
            refusal = str(error)
        else:
            assert plan == PLAN  # white space, or the case of an escape
            continue
        assert str(path) in refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is something else"),
        ("{}", "is something else"),
        ('{"magic": "kvjax prefix segment", "version": 2}', "is something else"),
        ('{"magic": "kvjax window plan", "version": 2}', "has version 2, and this program reads 1"),
        ('{"magic": "kvjax window plan", "version": 1}', "is damaged"),
        ("[" * 100_000, "is torn"),
        ("\xff\xfe", "is torn"),
    ],
)
def test_files_of_something_else_are_refused(path, text, message):
    path.write_text(text, encoding="latin-1")
    with pytest.raises(KvjaxError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"slots": [[1]], "model": MODEL}, "lacks or mistakes a field .*page_size"),
        ({"slots": 3, "model": MODEL, "page_size": 16}, "lacks or mistakes a field"),
        ({"slots": [["1"]], "model": MODEL, "page_size": 16}, r"slots\[0\]\[0\] is '1'"),
        ({"slots": [[-1]], "model": MODEL, "page_size": 16}, r"slots\[0\]\[0\] is -1"),
        ({"slots": [[1], [1, 2]], "model": MODEL, "page_size": 16}, "as many KV heads"),
        ({"slots": [[1]], "model": "", "page_size": 16}, "model is ''"),
        ({"slots": [[1]], "model": MODEL, "page_size": 0}, "page_size is 0"),
    ],
)
def test_fields_that_are_wrong_under_a_right_checksum_are_refused(path, body, message):
    from kvjax import sealed
    from kvjax.policies import window_plan

    head = {"magic": window_plan.MAGIC, "version": window_plan.VERSION}
    path.write_text(json.dumps(head | {"sha256": sealed.digest(body), "body": body}))
    with pytest.raises(KvjaxError, match=message):
        load(path)


@pytest.mark.parametrize(
    "slots", [(), ((),), ((1,), ()), [[1]], ((True,),), ((1.0,),), ((2**31,),)]
)
def test_other_slots_are_refused(slots):
    with pytest.raises(KvjaxError, match="slots"):
        WindowPlan(slots, MODEL, 16)


@pytest.mark.parametrize("slots", [[1, 2], [[1.5]], [["3"]]])
def test_only_whole_numbers_by_layer_and_head_become_a_plan(slots):
    with pytest.raises(KvjaxError, match="must be integers"):
        WindowPlan.of(slots, MODEL, 16)
