"""A writer that is killed, out of space or not alone leaves whole segments or none."""

import errno
import os
import pathlib
import re
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvjax.storage import segment_writer, unit_array
from kvjax.storage.blobs import Blobs
from kvjax.storage.errors import StoreError
from kvjax.storage.page_store import PageStore
from tests.storage.pages import (
    IDENTITY,
    N,
    P,
    assert_holds,
    bytes_below,
    files_of,
    keys_and_values,
    put,
    token_ids,
)

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SKETCHES = {"mean": np.arange(40, dtype=np.float32)}

# Writes of one new store with one segment: store.json, zarr.json, 4 shards, sketch, manifest.
WRITES = 8

KILLER = """
import os, pathlib, signal, sys
import numpy as np
from kvjax.storage import blobs, unit_array
from kvjax.storage.page_store import PageStore
from tests.storage.pages import put

root, when = pathlib.Path(sys.argv[1]), sys.argv[2]

def kill_at(k):
    count = 0
    def wrap(write):
        def writing(*arguments):
            nonlocal count
            count += 1
            if when == "before" and count == k:
                os.kill(os.getpid(), signal.SIGKILL)
            result = write(*arguments)
            if when == "after" and count == k:
                if write is start_write:
                    result.result()
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "during" and count == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return writing
    start_write = unit_array.start_write
    for owner, name in ((blobs.Blobs, "write"), (blobs.Blobs, "write_if"),
                        (unit_array, "start_write")):
        setattr(owner, name, wrap(getattr(owner, name)))

k, ended = 0, False
while not ended:
    k += 1
    child = os.fork()  # nothing of TensorStore runs yet, so there is no thread to lose
    if child == 0:
        kill_at(k)
        put(PageStore.open(root / str(k)), sketches={"mean": np.arange(40, dtype=np.float32)})
        os._exit(0)
    ended = os.WIFEXITED(os.waitpid(child, 0)[1])
print(k)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_writer_killed_at_any_write_publishes_all_or_nothing(tmp_path, when):
    """What was published stays readable, what was not is invisible, and gc frees it."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, tmp_path, when],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == WRITES + 1
    for k in range(1, WRITES + 2):
        store = PageStore.open(tmp_path / str(k))
        marker = (tmp_path / str(k) / "store.json").stat().st_size
        published = k > WRITES or (k == WRITES and when != "before")
        match = store.find(IDENTITY, token_ids(), P)
        assert (match is not None) == published
        assert store.verify() == []
        if published:
            assert_holds(match.segment, *keys_and_values())
            np.testing.assert_array_equal(match.segment.sketches()["mean"], SKETCHES["mean"])
        else:
            assert store.segments() == []
            garbage = bytes_below(tmp_path / str(k)) - marker
            assert store.gc().bytes == 0  # it may belong to a writer that still runs
            assert store.gc(min_age_s=0).bytes == garbage
            assert files_of(tmp_path / str(k)) == ["store.json"]
            put(store)
            assert_holds(store.find(IDENTITY, token_ids(), P).segment, *keys_and_values())


@pytest.mark.parametrize("k", range(WRITES - 1))
@pytest.mark.parametrize("how_often", ["once", "always"])
def test_no_space_left_at_any_write(tmp_path, monkeypatch, k, how_often):
    """The error says ENOSPC, nothing is published or left, and what was stored is still there."""
    store = PageStore.open(tmp_path)
    old = put(store, 1)
    before = files_of(tmp_path)
    count = 0

    def failing(owner, name):
        write = getattr(owner, name)

        def writing(*arguments):
            nonlocal count
            count += 1
            if count > k and (how_often == "always" or count == k + 1):
                text = "INTERNAL: Failed to write [os_error_code='28']"
                if owner is unit_array:
                    raise ValueError(text)
                raise StoreError(errno.ENOSPC, text)
            return write(*arguments)

        monkeypatch.setattr(owner, name, writing)

    failing(Blobs, "write")
    failing(Blobs, "write_if")
    failing(unit_array, "start_write")
    for _ in range(3 if how_often == "always" else 1):
        with pytest.raises(StoreError) as caught:
            put(store, 0, sketches=SKETCHES)
        assert caught.value.errno == errno.ENOSPC
        assert files_of(tmp_path) == before
    assert_holds(store.find(IDENTITY, token_ids(1), P).segment, *keys_and_values(1))
    if how_often == "once":
        assert put(store, 0, sketches=SKETCHES).tokens == N * P
        assert len(store.segments()) == 2
    store.flush()
    assert store.open_segment(old.key).info.hits == 1


def test_a_real_limit_of_the_file_system(tmp_path):
    """A file may not grow beyond a limit: a clear error with errno, and all is as it was."""
    script = (
        "import resource, sys, tests.storage.pages as pages\n"
        "from kvjax.storage.page_store import PageStore\n"
        "store = PageStore.open(sys.argv[1])\n"
        "pages.put(store, 1, pages=1)\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))\n"
        "for attempt in range(2):\n"
        "    try: pages.put(store, 0, pages=40)\n"
        "    except OSError as error: print(type(error).__name__, error.errno)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "pages.put(store, 0, pages=40); print(len(store.segments()), store.verify())\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"StoreError {errno.EFBIG}"] * 2 + ["2 []"]
    assert len(files_of(tmp_path / "data")) == 2 * (4 + 1)


def test_control_c_leaves_nothing(tmp_path, monkeypatch):
    store = PageStore.open(tmp_path)
    write, count = unit_array.start_write, 0

    def interrupted(*arguments):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(unit_array, "start_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(store)
    assert files_of(tmp_path) == ["store.json"]


def test_what_cannot_be_removed_after_a_failed_write_is_left_for_gc(tmp_path, monkeypatch):
    store = PageStore.open(tmp_path)

    def failing(*_):
        raise StoreError(errno.EIO, "device")

    monkeypatch.setattr(segment_writer, "write_shards", failing)
    monkeypatch.setattr(Blobs, "delete_folder", failing)
    with pytest.raises(StoreError, match="device"):
        put(store)
    monkeypatch.undo()
    assert store.segments() == []
    assert store.gc(min_age_s=0).segments == 1
    assert files_of(tmp_path) == ["store.json"]


@pytest.mark.parametrize("one_process", [True, False])
def test_two_writers_of_one_prefix_at_once_leave_one_whole_segment(tmp_path, one_process):
    """The first to publish wins, the other takes what is there and removes its own."""
    store = PageStore.open(tmp_path)
    others = [store if one_process else PageStore.open(tmp_path) for _ in range(3)]
    start, infos = threading.Barrier(3), []

    def write(other):
        start.wait()
        infos.append(put(other, 0, sketches=SKETCHES))

    threads = [threading.Thread(target=write, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({(info.key, info.created) for info in infos}) == 1
    assert len(list((tmp_path / "data").iterdir())) == 1
    assert_holds(PageStore.open(tmp_path).open_segment(infos[0].key), *keys_and_values())


def test_a_writer_that_loses_the_race_at_the_last_step_leaves_nothing(tmp_path, monkeypatch):
    store, other = PageStore.open(tmp_path), PageStore.open(tmp_path)
    write_if = Blobs.write_if

    def late(blobs, name, value, generation):
        if blobs is store._blobs:
            put(other)
        return write_if(blobs, name, value, generation)

    monkeypatch.setattr(Blobs, "write_if", late)
    info = put(store)
    assert info == other.segments()[0]
    assert len(list((tmp_path / "data").iterdir())) == 1
    assert_holds(store.open_segment(info.key), *keys_and_values())


READER = """
import sys
from kvjax.storage.page_store import PageStore
from tests.storage.pages import *

store = PageStore.open(sys.argv[1], read_only=True)
seen = set()
while len(seen) < 6:
    for seed in range(6):
        match = store.find(IDENTITY, token_ids(seed), P)
        if match is None:
            assert seed not in seen, "what was published has gone"
            continue
        assert_holds(match.segment, *keys_and_values(seed))
        seen.add(seed)
assert {reason for reason, count in store.stats().misses.items() if count} <= {"absent"}
print("all")
"""

WRITER = """
import sys
from kvjax.storage.page_store import PageStore
from tests.storage.pages import *

store = PageStore.open(sys.argv[1])
for seed in range(6):
    put(store, seed)
print("all")
"""


@pytest.mark.slow
def test_two_readers_and_a_writer_in_processes_of_their_own(tmp_path):
    """Readers see segments appear whole, one by one, and never lose one."""
    PageStore.open(tmp_path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in (READER, READER, WRITER)
    ]
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert output == "all\n", errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(PageStore.open(tmp_path).segments()) == 6


def test_folders_tell_when_they_were_begun(tmp_path):
    put(PageStore.open(tmp_path))
    (folder,) = os.listdir(tmp_path / "data")
    assert re.fullmatch(r"[0-9a-f]{64}\.\d+\.[0-9a-f]{8}", folder)
    assert 0 <= segment_writer.folder_age(folder) < 60
    assert segment_writer.folder_age("lost+found") is None
    assert segment_writer.folder_age("a.b.c") is None
