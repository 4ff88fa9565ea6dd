"""Runs pytest on the test file that a Bazel target names: `bazel test //:tests.kvjax.test_spec`."""

import pathlib
import sys

import pytest

if __name__ == "__main__":
    # Bazel links the sources into a tree of its own; the rules of the house read the real one.
    checkout = pathlib.Path(__file__).resolve().parent.parent
    files = [str(checkout / name) for name in sys.argv[1:]]
    sys.exit(pytest.main([f"--rootdir={checkout}", "-p", "no:cacheprovider", *files]))
