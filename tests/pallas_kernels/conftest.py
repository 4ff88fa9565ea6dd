"""Devices that are not here, for programs that are compiled ahead of time."""

import pytest
from jax.experimental import topologies


@pytest.fixture(scope="session")
def device():
    """A function from a topology's name to one of its devices."""
    pytest.importorskip("libtpu", reason="no libtpu: `pip install libtpu` compiles without a TPU")
    with pytest.MonkeyPatch.context() as patch:
        # Read once, when the library is loaded: ask no metadata server, share with other workers.
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield lambda name: topologies.get_topology_desc(name, platform="tpu").devices[0]
