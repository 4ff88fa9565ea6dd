import pathlib

import pytest

from kvjax.errors import KvjaxError
from kvjax.registry import MODELS, cache_root, model_path, source_of, split_hub_name


def test_every_row_is_complete():
    for name, source in MODELS.items():
        assert source.name == name
        assert len(source.sha256) == 64
        assert int(source.sha256, 16) > 0
        assert all("==" in package for package in source.packages)
        assert source.size > 0
        assert source.download_size > 0


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("smollm2", "did you mean 'smollm2-135m'"), ("gemma-270m", "did you mean 'gemma3-270m'")],
)
def test_an_unknown_name_suggests_a_close_one(wrong, hint):
    with pytest.raises(KvjaxError, match=hint):
        source_of(wrong)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(KvjaxError, match=r"called 'zzz'; names: smollm2-135m, gemma3-270m; hf:ORG"):
        source_of("zzz")


def test_places():
    root = pathlib.Path("/somewhere")
    assert model_path("smollm2-135m", root) == root / "models" / "smollm2-135m.gguf"
    assert model_path("hf:a/b", root) == root / "models" / "hf" / "a--b@main"
    assert model_path("hf:a/b@refs/pr/1", root) == root / "models" / "hf" / "a--b@refs--pr--1"
    assert cache_root("~/x") == pathlib.Path.home() / "x"
    assert cache_root().name == "kvjax"


def test_hub_names():
    assert split_hub_name("hf:org/name") == ("org", "name", "main")
    assert split_hub_name("hf:org/name@v1") == ("org", "name", "v1")


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a/b/c", "hf:/b", "hf:a/", "hf:a/b@", "hf:../..", "hf: a/b"]
)
def test_hub_names_of_another_form_are_refused(name):
    with pytest.raises(KvjaxError, match="write hf:ORG/NAME"):
        split_hub_name(name)
