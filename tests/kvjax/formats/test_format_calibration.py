"""The file that keeps a calibration: whole, this model's, or refused."""

import json

import pytest

from kvjax.errors import KvjaxError
from kvjax.formats import FormatCalibration, load_calibrated
from kvjax.formats.calibration import MAGIC, VERSION
from kvjax.sealed import digest
from tests.kvjax.formats.samples import calibration, plain_keys, some_values

FOUND = calibration(plain_keys(8), some_values(8))


@pytest.fixture
def path(tmp_path):
    FOUND.save(tmp_path / "formats.json")
    return tmp_path / "formats.json"


def test_what_was_saved_is_loaded(path):
    assert FormatCalibration.load(path, model=FOUND.model) == FOUND
    assert load_calibrated(path, "kvquant3") == FOUND.format("kvquant3")


@pytest.mark.parametrize("name", ["kvquant5", "int4", ""])
def test_other_formats_are_refused(path, name):
    with pytest.raises(KvjaxError, match="makes one of fp8-calibrated, mixed4, mixed3, kvquant4"):
        load_calibrated(path, name)


def test_another_models_calibration_is_refused(path):
    with pytest.raises(KvjaxError, match="is for model 000000000000, and this one is 111111111111"):
        load_calibrated(path, "kvquant3", model="1" * 64)


def test_a_damaged_file_is_refused(path):
    text = path.read_text()
    for damaged, said in (
        (text[: len(text) // 2], "torn"),
        (text.replace('"tokens": 128', '"tokens": 129'), "damaged"),
        ("{}", "something else"),
        (text.replace(f'"version": {VERSION}', '"version": 0'), "version 0"),
    ):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(KvjaxError, match=said):
            FormatCalibration.load(path)
    path.unlink()
    with pytest.raises(KvjaxError, match="does not exist"):
        FormatCalibration.load(path)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("key_most", [1.0], "key_most has shape"),
        ("key_middle", [[float("nan")] * 16] * 2, "not finite"),
        ("key_levels", [[0.0] * 4], "key_levels are not of"),
        ("value_levels", [[0, 1, 2, 1], [0] * 8, [0] * 16], "value_levels do not ascend"),
        ("sharpen", 0, "sharpen is 0"),
        ("losses", [[0.1] * 4, [0.1] * 3], "not 4 finite numbers"),
        ("losses", [[0.1] * 4, [0.1, 0.1, -0.1, 0]], "not 4 finite numbers"),
        ("frequencies", "x", "could not convert"),
    ],
)
def test_fields_that_are_wrong_under_a_right_checksum_are_refused(path, field, value, said):
    body = json.loads(path.read_text())["body"]
    body["layers"][0][field] = value
    head = {"magic": MAGIC, "version": VERSION, "sha256": digest(body)}
    path.write_text(json.dumps(head | {"body": body}))
    with pytest.raises(KvjaxError, match=f"lacks or mistakes a field .*{said}"):
        FormatCalibration.load(path)
