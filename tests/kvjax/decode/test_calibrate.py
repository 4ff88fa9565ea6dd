"""Calibration: what is tried, what is chosen of it, and the file that keeps it."""

import dataclasses
import functools
import importlib
import json

import psutil
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import Calibration, Trial, calibrate, generate
from kvjax.decode.calibration import with_centroids
from kvjax.decode.identity import fingerprint
from kvjax.errors import KvjaxError
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.policies import Hierarchical, Place, RetroInfer, Select, Window, WindowPlan
from kvjax.sealed import digest
from tests.kvjax.decode.tiny import attention, config, model, prompt

trials = importlib.import_module("kvjax.decode.calibrate")  # the function has its name

PROMPTS = [prompt(104, seed) for seed in range(2)]
CACHE = CacheConfig(page_size=8, select=Select("25%", "mean"), place=Place())
FOUND = Calibration(
    model="0" * 64,
    page_size=8,
    per_centroid=None,
    times=2.0,
    micro_batches=2,
    slots=None,
    trials=(Trial("window", 2.0, 0.01, 0.002, 0.003, 0.9),),
)


@functools.cache
def one_layer():
    """As quick to compile as a model can be."""
    checkpoint = random_checkpoint(config(attention()), seed=3)
    return from_checkpoint(checkpoint, name="one layer", dtype="float32")


@pytest.mark.slow
def test_what_is_tried_and_found(monkeypatch):
    said = []
    monkeypatch.setattr(trials, "CENTROIDS", (1, 4))  # each takes as long as the rest together
    cache = dataclasses.replace(CACHE, select=Select("25%", Hierarchical(pages_per_cluster=1)))
    result = calibrate(
        one_layer(),
        PROMPTS,
        cache,
        new_tokens=6,
        runs=1,
        plan=True,
        progress=lambda *told: said.append(told),
    )
    by_setting = {}
    for trial in result.trials:
        by_setting.setdefault(trial.setting, []).append(trial)
        assert trial.step_seconds > trial.fetch_seconds >= 0
    assert [trial.value for trial in by_setting["centroids"]] == [1, 4]
    assert all(trial.kl >= 0 for trial in by_setting["centroids"])
    windows = by_setting["window"]
    assert [trial.value for trial in windows] == sorted(trial.value for trial in windows)
    hits = [trial.hit_ratio for trial in windows]
    assert hits == sorted(hits)
    assert [trial.value for trial in by_setting["micro-batches"]] == [1, 2]
    assert said[0] == ("calibrate", 0.0)
    assert said[-1] == ("calibrate", 1.0)

    # A window grows until looking up takes as long as fetching.
    *smaller, last = windows
    assert all(trial.evaluate_seconds < trial.fetch_seconds for trial in smaller)
    assert result.times == last.value

    # Window, plan and micro-batches only say where pages are, and when they are read.
    assert cache.select is not None
    assert result.per_centroid is not None
    select = dataclasses.replace(
        cache.select, by=with_centroids(cache.select.index(), result.per_centroid)
    )
    plain = dataclasses.replace(cache, select=select)
    drawn = [
        generate(one_layer(), PROMPTS, max_new_tokens=9, cache=c)
        for c in (plain, result.apply(cache))
    ]
    assert drawn[0].tokens == drawn[1].tokens


def test_the_fewest_good_centroids_are_taken():
    tried = [
        Trial("centroids", value, 1, 0, kl=kl) for value, kl in ((1, 0.1), (2, 0.109), (4, 0.12))
    ]
    assert trials._fewest(tried) == 2
    assert trials._fewest([dataclasses.replace(t, kl=0.0) for t in tried]) == 4
    assert trials._fewest([dataclasses.replace(t, kl=-1e-9) for t in tried]) == 4


def test_parts_must_pay():
    tried = [
        Trial("micro-batches", v, s, 0) for v, s in ((1, 1.0), (2, 0.99), (4, 0.97), (8, 0.96))
    ]
    assert trials._fastest(tried) == 4
    assert trials._parts(6) == [1, 2, 4]


def test_a_calibration_survives_its_file(tmp_path):
    found = dataclasses.replace(FOUND, model=fingerprint(one_layer()))
    for result in (found, dataclasses.replace(found, per_centroid=4, slots=((3, 4), (5, 6)))):
        result.save(tmp_path / "tiers.json")
        assert Calibration.load(tmp_path / "tiers.json", model=one_layer()) == result


def test_another_model_is_refused(tmp_path):
    FOUND.save(tmp_path / "tiers.json")
    with pytest.raises(KvjaxError, match=r"tiers.json is for model \w+, and mha is \w+: calibrate"):
        Calibration.load(tmp_path / "tiers.json", model=model("mha"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("times"), "lacks or mistakes a field .*times"),
        (lambda body: body.update(page_size=0), "page_size is 0"),
        (lambda body: body.update(micro_batches="two"), "micro_batches is 'two'"),
        (lambda body: body["trials"][0].update(luck=1), "lacks or mistakes a field .*luck"),
        (lambda body: body.update(slots=[[-1]]), "slots is -1"),
    ],
)
def test_wrong_fields_are_refused(tmp_path, change, message):
    path = tmp_path / "tiers.json"
    FOUND.save(path)
    written = json.loads(path.read_text())
    change(written["body"])
    path.write_text(json.dumps(written | {"sha256": digest(written["body"])}))
    with pytest.raises(KvjaxError, match=message):
        Calibration.load(path, model=one_layer())


def test_a_calibration_is_of_tiers():
    with pytest.raises(KvjaxError, match="a calibration is of selected pages"):
        FOUND.apply(CacheConfig(page_size=8))
    with pytest.raises(KvjaxError, match="page_size is 16, and the calibration is for 8"):
        FOUND.apply(CacheConfig(page_size=16, select=Select(), place=Place()))
    applied = FOUND.apply(CACHE)
    assert applied.window == Window(times=2.0)
    assert applied.place == Place(micro_batches=2)
    planned = dataclasses.replace(CACHE, window=Window(plan="former.json"))
    assert FOUND.apply(planned).window == Window(times=2.0)
    slots = dataclasses.replace(FOUND, slots=((3,),)).apply(planned).window
    assert slots == Window(plan=WindowPlan(((3,),), FOUND.model, FOUND.page_size))
    other = dataclasses.replace(FOUND, per_centroid=4)
    with pytest.raises(KvjaxError, match=r"4 entries a centroid.*no centroids"):
        other.apply(CACHE)
    clusters = other.apply(dataclasses.replace(CACHE, select=Select(by=RetroInfer())))
    assert clusters.select is not None
    assert clusters.select.by == RetroInfer(tokens_per_cluster=4)


@pytest.mark.parametrize(
    ("prompts", "cache", "options", "message"),
    [
        (PROMPTS, CacheConfig(), {}, "cache has no select or no place"),
        (
            [prompt(39, 0)],
            CACHE,
            {"new_tokens": 8},
            "prompt 0 has 39 tokens: the last 8 are decoded",
        ),
        (PROMPTS, CACHE, {"new_tokens": 1}, "new_tokens is 1"),
        (PROMPTS, CACHE, {"runs": 0}, "runs is 0"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(prompts, cache, options, message):
    with pytest.raises(KvjaxError, match=message):
        calibrate(model(), prompts, cache, **options)


def test_a_machine_that_is_too_small_says_so(monkeypatch):
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    with pytest.raises(KvjaxError, match="and this machine has 1000 bytes of memory free"):
        calibrate(model(), PROMPTS, CACHE, new_tokens=6)
