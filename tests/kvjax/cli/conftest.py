import importlib

import pytest


@pytest.fixture(autouse=True)
def programs_are_not_kept(monkeypatch):
    """Commands that run in the test's own process leave its compilation settings alone."""
    monkeypatch.setattr(importlib.import_module("kvjax.programs"), "keep_programs", lambda _: None)
