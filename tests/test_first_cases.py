"""A shorter run has every test."""

import pathlib
import types

from tests.first_cases import first_cases

WHOLE = pathlib.Path("tests/kernels")


def item(nodeid):
    return types.SimpleNamespace(nodeid=nodeid, path=pathlib.Path(nodeid.split("::")[0]))


def test_of_a_parametrised_test_the_first_case_is_left():
    names = [
        "tests/a/test_x.py::test_one[1-[2]]",
        "tests/a/test_x.py::test_one[3]",
        "tests/a/test_x.py::test_two",
        "tests/b/test_x.py::test_one[3]",
        "tests/kernels/test_x.py::test_one[cpu]",
        "tests/kernels/test_x.py::test_one[tpu]",
    ]
    wanted, others = first_cases([item(name) for name in names], WHOLE)
    assert [item.nodeid for item in others] == [names[1]]
    assert [item.nodeid for item in wanted] == [names[0], *names[2:]]
