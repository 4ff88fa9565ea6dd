"""Healing lowers the divergence, changes what it says, and goes on where it was stopped."""

import dataclasses

import numpy as np
import pytest

from kvjax import KvjaxError
from kvjax.convert import Healing, convert_mla, heal, judged, split_texts
from kvjax.convert.healing_files import HealingFiles, check_healing_folder
from kvjax.model import from_checkpoint
from kvjax.models import LayerConfig, random_checkpoint
from tests.kvjax.decode.tiny import config, prompt

HEALING = Healing(steps=60, learning_rate=3e-3, keep_every=25)


@pytest.fixture(scope="module")
def model():
    layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    checkpoint = random_checkpoint(config(layer), seed=5)
    for name, value in checkpoint.weights.items():
        if ".attention." in name:
            value *= 2  # so that it matters what is attended to
    return from_checkpoint(checkpoint, name="small", dtype="float32")


@pytest.fixture(scope="module")
def windows(model):
    return split_texts(model, prompt(2400), window=48)


@pytest.fixture(scope="module")
def converted(model, windows):
    return convert_mla(model, windows.learnt, rank=4, rope_dim=2).checkpoint


@pytest.fixture(scope="module")
def healed(model, converted, windows):
    return heal(model, converted, windows.learnt, HEALING)


def as_model(checkpoint):
    return from_checkpoint(checkpoint, name="other", dtype="float32")


def test_healing_brings_predictions_closer(model, windows, converted, healed):
    """Of text that was not learnt; the first loss is that of the converted model."""
    before, after = (
        judged(model, as_model(one), windows.held_out) for one in (converted, healed.checkpoint)
    )
    assert after.kl < 0.9 * before.kl
    assert len(healed.losses) == 60
    assert np.mean(healed.losses[-20:]) < 0.9 * np.mean(healed.losses[:5])


def test_only_attention_changes_unless_all_may(model, windows, converted, healed):
    def changed(one):
        weights = converted.weights
        return {n for n in weights if not np.array_equal(weights[n], one.checkpoint.weights[n])}

    attention = {name for name in converted.weights if ".attention." in name}
    assert changed(healed) == attention
    every = dataclasses.replace(HEALING, steps=1, parts="all")
    other = changed(heal(model, converted, windows.learnt, every))
    assert other == {name for name in converted.weights if name.startswith("layers.")}


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    model, windows, converted, healed, tmp_path
):
    def stop(step, loss):
        if step == 52:
            raise KeyboardInterrupt

    folder, steps = tmp_path / "run", []
    with pytest.raises(KeyboardInterrupt):
        heal(model, converted, windows.learnt, HEALING, folder=folder, progress=stop)
    again = heal(
        model,
        converted,
        windows.learnt,
        HEALING,
        folder=folder,
        progress=lambda step, loss: steps.append(step),
    )
    assert steps == list(range(51, 61))
    assert again.losses == healed.losses
    for name, value in healed.checkpoint.weights.items():
        np.testing.assert_array_equal(again.checkpoint.weights[name], value)
    other = dataclasses.replace(HEALING, learning_rate=1e-3)
    with pytest.raises(KvjaxError, match=r"run holds a run with learning_rate=0.003, and this one"):
        heal(model, converted, windows.learnt, other, folder=folder)
    files = again.files
    with pytest.raises(KvjaxError, match="run holds a run with seed=0, and this one has 1"):
        dataclasses.replace(files, identity=files.identity | {"seed": 1}).drop()
    assert folder.exists()
    files.drop()
    assert not folder.exists()


def test_a_folder_that_is_no_run_is_refused_and_stays(model, converted, windows, tmp_path):
    (tmp_path / "mine").write_text("a thesis")
    files = HealingFiles.at(tmp_path, {})
    for call in (
        lambda: heal(model, converted, windows.learnt, HEALING, folder=tmp_path),
        lambda: files.drop(),
        lambda: check_healing_folder(tmp_path / "mine"),
    ):
        with pytest.raises(KvjaxError, match="is already there and holds no checkpoint"):
            call()
    (tmp_path / "mine").unlink()
    assert files.newest("fresh") == (0, [], "fresh")
    files.drop()
    assert tmp_path.exists()
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "mine").write_text("a thesis")
    with pytest.raises(KvjaxError, match="holds no whole checkpoint"):
        files.drop()
    assert (tmp_path / "2024" / "mine").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0: must be an integer of at least 1"),
        ({"parts": "mlp"}, "parts is 'mlp': must be 'attention' or 'all'"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0: must be a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(KvjaxError, match=message):
        dataclasses.replace(HEALING, **change)
