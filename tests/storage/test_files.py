import contextlib
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from kvjax.storage import files

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_publishes_a_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "deep" / "model.bin"
    with files.publish(target) as unfinished:
        assert unfinished.parent == target.parent
        unfinished.write_bytes(b"weights")
        assert not target.exists()
    assert target.read_bytes() == b"weights"
    assert names(target.parent) == ["model.bin"]


def test_replaces_an_older_file_in_one_step(tmp_path):
    target = tmp_path / "model.bin"
    target.write_bytes(b"old")
    with files.publish(target) as unfinished:
        unfinished.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["model.bin"]


def test_published_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with files.publish(tmp_path / "published") as unfinished:
        unfinished.write_bytes(b"")
    modes = {(tmp_path / name).stat().st_mode for name in ("plain", "published")}
    assert len(modes) == 1


def test_publishes_a_folder_with_read_only_files(tmp_path):
    target = tmp_path / "checkpoint"
    with files.publish(target) as unfinished:
        (unfinished / "shards").mkdir(parents=True)
        (unfinished / "shards" / "0").write_bytes(b"zero")
        (unfinished / "shards" / "0").chmod(0o444)
    assert (target / "shards" / "0").read_bytes() == b"zero"
    assert names(tmp_path) == ["checkpoint"]


def test_never_replaces_a_folder(tmp_path):
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "old").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="already there"), files.publish(target) as unfinished:
        unfinished.mkdir()
    with pytest.raises(IsADirectoryError, match="folder"), files.publish(target) as unfinished:
        unfinished.write_bytes(b"file")
    assert names(tmp_path) == ["checkpoint"]
    assert names(target) == ["old"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_exception_leaves_nothing(tmp_path, error, kind):
    target = tmp_path / "model"
    with contextlib.suppress(error), files.publish(target) as unfinished:
        if kind == "file":
            unfinished.write_bytes(b"half")
        else:
            unfinished.mkdir()
            (unfinished / "half").write_bytes(b"half")
        raise error
    assert names(tmp_path) == []


def test_an_exception_keeps_the_older_file(tmp_path):
    target = tmp_path / "model"
    target.write_bytes(b"old")
    with contextlib.suppress(OSError), files.publish(target) as unfinished:
        unfinished.write_bytes(b"half of the n")
        raise OSError("disk full")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["model"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), files.publish(tmp_path / "model"):
        pass
    assert names(tmp_path) == []


@pytest.mark.slow
def test_a_write_the_system_cuts_short_leaves_nothing(tmp_path):
    """A real limit of the operating system: the process may write 64 KiB to a file, no more."""
    resource = pytest.importorskip("resource")
    script = f"""
import resource, signal
from kvjax.storage import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
with files.publish({str(tmp_path / "model")!r}) as unfinished:
    unfinished.write_bytes(bytes(1 << 20))
"""
    assert resource.RLIM_INFINITY is not None
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert names(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for a child process")
@pytest.mark.parametrize("old", [None, b"old"])
def test_control_c_in_the_middle_of_a_write_leaves_nothing(tmp_path, old):
    target = tmp_path / "model"
    if old is not None:
        target.write_bytes(old)
    script = f"""
from kvjax.storage import files
with files.publish({str(target)!r}) as unfinished, open(unfinished, "wb") as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    while True:
        file.write(b"more")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "writing\n"
        assert len([name for name in names(tmp_path) if name.endswith(".unfinished")]) == 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert names(tmp_path) == ([] if old is None else ["model"])
    if old is not None:
        assert target.read_bytes() == old


def test_concurrent_publishers_each_leave_a_whole_file(tmp_path):
    target = tmp_path / "model"
    contents = [bytes([i]) * 100_000 for i in range(8)]
    barrier = threading.Barrier(len(contents))
    torn = []

    def write(content):
        barrier.wait()
        for _ in range(10):
            with files.publish(target) as unfinished:
                unfinished.write_bytes(content)
            if target.read_bytes() not in contents:
                torn.append(content[0])

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert target.read_bytes() in contents
    assert names(tmp_path) == ["model"]


def test_of_concurrent_publishers_of_a_folder_one_wins_and_the_others_say_so(tmp_path):
    target = tmp_path / "checkpoint"
    barrier = threading.Barrier(6)
    outcomes = []

    def write(number):
        try:
            with files.publish(target) as unfinished:
                unfinished.mkdir()
                (unfinished / "number").write_text(str(number))
                barrier.wait()
            outcomes.append(number)
        except OSError:  # FileExistsError, or the rename itself refusing a folder that has files
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number in outcomes if number is not None]
    assert len(winners) == 1
    assert (target / "number").read_text() == str(winners[0])
    assert names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_sha256_equals_hashlib_and_counts_to_the_end(tmp_path, size):
    content = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    content = content[:size]
    (tmp_path / "file").write_bytes(content)
    calls = []
    digest = files.sha256(tmp_path / "file", lambda done, total: calls.append((done, total)))
    assert digest == hashlib.sha256(content).hexdigest()
    assert digest == files.sha256(tmp_path / "file")
    assert [total for _, total in calls] == [size] * len(calls)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    if size:
        assert calls[-1] == (size, size)


def test_remove_takes_files_folders_links_and_nothing(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    files.remove(tmp_path / "link")
    assert (tmp_path / "folder").is_dir()
    for name in ("folder", "file", "absent"):
        files.remove(tmp_path / name)
    assert names(tmp_path) == []
