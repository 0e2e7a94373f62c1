"""Shards behind a real web server that drops connections, answers slowly or not at all, and the bounded cache."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from idn.data import download, open_stream
from idn.data.index import INDEX
from idn.data.locate import load_index
from idn.errors import UserError
from tests.data.helpers import WebServer, epoch_of, write_numbered


def test_a_remote_epoch_equals_a_local_one_and_is_fetched_once(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [30] * 4)
    with WebServer(tmp_path / "shards") as web:
        for _ in range(2):
            assert epoch_of(web.url, batch=7) == epoch_of(tmp_path / "shards", batch=7)
        assert epoch_of(web.url, batch=7, workers=2) == epoch_of(tmp_path / "shards", batch=7)
        fetched = {path: count for path, count in web.requests.items() if path.endswith(".tar")}
        assert set(fetched.values()) == {1} and len(fetched) == 4


def test_dropped_connections_and_busy_servers_are_survived(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [100] * 2, shape=(3, 32, 32))
    size = (tmp_path / "shards" / "train-000000.tar").stat().st_size
    with WebServer(tmp_path / "shards", drop_after=size // 3, drops=6, failures=2) as web:
        assert sorted(epoch_of(web.url)) == list(range(200))
        assert web.drops == 0 and web.failures == 0 and web.ranged >= 3


def test_a_server_without_ranges_starts_over(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [100], shape=(3, 32, 32))
    with WebServer(tmp_path / "shards", drop_after=100_000, drops=2, ranges=False) as web:
        assert len(epoch_of(web.url)) == 100
        assert web.ranged == 0


def test_a_slow_server_is_waited_for_but_not_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "shards", [50], shape=(3, 32, 32))
    monkeypatch.setattr(download, "TIMEOUT", 1.0)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    with WebServer(tmp_path / "shards", delay=0.1) as web:
        assert len(epoch_of(web.url)) == 50
    with WebServer(tmp_path / "shards", delay=3.0) as web, pytest.raises(UserError, match=r"index.json.*timed out"):
        epoch_of(web.url)


def test_unreadable_urls_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/.*refused"):
        open_stream("http://127.0.0.1:9/cifar10")
    write_numbered(tmp_path / "shards", [4, 4])
    with WebServer(tmp_path / "shards") as web:
        (tmp_path / "shards" / "train-000001.tar").unlink()
        with pytest.raises(UserError, match=r"train-000001\.tar is missing"):
            epoch_of(web.url)
        (tmp_path / "shards" / INDEX).unlink()
        with pytest.raises(UserError, match="cannot be listed"):
            open_stream(web.url)
        with pytest.raises(UserError, match="shard not found"):
            open_stream(f"{web.url}/{{0..3}}.tar")


def test_a_shard_that_changed_under_way_is_refused(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [10])
    shard = tmp_path / "shards" / "train-000000.tar"
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    with WebServer(tmp_path / "shards") as web, pytest.raises(UserError, match=r"train-000000\.tar has SHA-256"):
        epoch_of(web.url)


def test_the_cache_never_holds_more_than_its_limit(tmp_path: Path) -> None:
    index = write_numbered(tmp_path / "shards", [20] * 12, shape=(3, 32, 32))
    limit = 4 * max(shard.bytes for shard in index.shards)
    cache = tmp_path / "small"
    largest = 0
    with WebServer(tmp_path / "shards") as web:
        stream = open_stream(web.url, batch=8, window=40, cache=cache, cache_bytes=limit)
        for _ in stream:
            largest = max(largest, sum(path.stat().st_size for path in cache.iterdir()))
        assert 0 < largest <= limit
        assert max(web.requests.values()) == 1, "no shard is fetched twice within an epoch"
        with pytest.raises(UserError, match=r"raise cache_bytes or lower window"):
            open_stream(web.url, cache=cache, cache_bytes=limit)


def _read(url: str, queue: "multiprocessing.Queue[list[int]]") -> None:
    queue.put(epoch_of(url, batch=10))


def test_processes_of_a_machine_share_one_download(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [30, 30], shape=(3, 32, 32))
    with WebServer(tmp_path / "shards", delay=0.05) as web:
        context = multiprocessing.get_context("forkserver")
        queue = context.Queue()
        readers = [context.Process(target=_read, args=(web.url, queue)) for _ in range(3)]
        for reader in readers:
            reader.start()
        epochs = [queue.get(timeout=120) for _ in readers]
        for reader in readers:
            reader.join()
        assert epochs[0] == epochs[1] == epochs[2]
        assert web.requests["/train-000000.tar"] == web.requests["/train-000001.tar"] == 1


def test_a_full_disk_under_the_cache_is_told(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [100], shape=(3, 32, 32))
    code = (
        "import resource, signal, sys; from idn.data import open_stream; from idn.errors import UserError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (99_999, 99_999))\n"
        "try: list(open_stream(sys.argv[1], cache=sys.argv[2]))\n"
        "except UserError as error: print(error)"
    )
    with WebServer(tmp_path / "shards") as web:
        command = [sys.executable, "-c", code, web.url, str(tmp_path / "full")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "free space" in done.stdout
    assert [path for path in (tmp_path / "full").iterdir() if path.suffix != ".lock"] == []


def test_object_stores_are_read_through_fsspec(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/shards"
    write_numbered(url, [10, 10])
    assert epoch_of(url, shuffle=False) == list(range(20))
    assert load_index(f"memory://{tmp_path.name}/nothing") is None


@pytest.mark.parametrize("url", ["pipe:cat x.tar", "ssh://host/x", "simplecache::s3://bucket/x", "reference::x"])
def test_urls_that_run_commands_or_are_unknown_are_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"would run a command|use a path or one of"):
        open_stream(url)


def test_pipes_run_when_asked_for_by_name(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10])
    (tmp_path / INDEX).unlink()
    command = f"pipe:cat {tmp_path}/train-000000.tar"
    assert epoch_of(command, shuffle=False, allow_pipe=True) == list(range(10))
    assert epoch_of(command, shuffle=False, allow_pipe=True, workers=1) == list(range(10))
    with pytest.raises(UserError, match="ended with code 3"):
        epoch_of("pipe:exit 3", allow_pipe=True)


def test_the_cache_says_when_it_cannot_be_used(tmp_path: Path) -> None:
    write_numbered(tmp_path / "shards", [3])
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with WebServer(tmp_path / "shards") as web, pytest.raises(UserError, match="cannot use the cache"):
        epoch_of(web.url, cache=blocked / "cache")
