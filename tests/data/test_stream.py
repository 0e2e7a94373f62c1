"""Exactly once, the same for everybody, and resumable: for any shards, ranks, processes, batch and moment."""

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from idn.data import open_stream
from idn.data.order import Order
from idn.data.stream import Batch, Stream
from idn.errors import UserError
from tests.data.helpers import epoch_of, numbers_of, write_numbered

properties = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
shard_sizes = st.integers(1, 40)
totals = st.integers(1, 150)
worlds = st.integers(1, 7)
batches = st.integers(1, 33)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> "Folders":
    return Folders(tmp_path_factory.mktemp("numbered"))


class Folders:
    """Datasets of a given size and shard size, each written once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, total: int, shard_samples: int) -> str:
        folder = self.root / f"{total}-{shard_samples}"
        if not folder.exists():
            counts = [shard_samples] * (total // shard_samples) + [total % shard_samples]
            write_numbered(folder, [n for n in counts if n] if total >= shard_samples else [total])
        return str(folder)


def ranks(place: str, world: int, **options: object) -> list[Stream]:
    return [open_stream(place, rank=rank, world=world, **options) for rank in range(world)]  # type: ignore[arg-type]


def real(batch: Batch) -> list[int]:
    """The numbers of a batch's images, stand-ins left out."""
    return [n for n, place in zip(numbers_of(batch.images), batch.positions.tolist(), strict=True) if place >= 0]


def positions(rows: list[list[Batch]]) -> list[int]:
    return [place for row in rows for batch in row for place in batch.positions.tolist() if place >= 0]


@properties
@given(totals, shard_sizes, worlds, batches, st.booleans(), st.integers(1, 60))
def test_an_epoch_covers_every_sample_exactly_once(
    folders: Folders, total: int, shard: int, world: int, batch: int, shuffle: bool, window: int
) -> None:
    streams = ranks(folders(total, shard), world, batch=batch, shuffle=shuffle, window=window)
    rows = [list(stream) for stream in streams]
    assert {len(row) for row in rows} == {streams[0].batches} == {math.ceil(total / (batch * world))}
    assert sorted(n for row in rows for b in row for n in real(b)) == list(range(total))
    assert sorted(positions(rows)) == list(range(total))
    for global_batch in zip(*rows, strict=True):
        assert sum(b.weight for b in global_batch) == pytest.approx(world)
        sizes = [len(b.images) for b in global_batch]
        assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1
        assert not shuffle or min(sizes) >= 1


@properties
@given(totals, shard_sizes, worlds, worlds, batches, batches, st.data())
def test_resume_continues_with_the_very_next_sample_on_other_ranks(
    folders: Folders, total: int, shard: int, world: int, world2: int, batch: int, batch2: int, data: st.DataObject
) -> None:
    place = folders(total, shard)
    expected = [n for b in open_stream(place, batch=total, seed=3) for n in numbers_of(b.images)]
    streams = ranks(place, world, batch=batch, seed=3)
    done: dict[int, int] = {}
    stop = data.draw(st.integers(0, streams[0].batches), label="batches before the stop")
    for stream in streams:
        for _, b in zip(range(stop), stream, strict=False):
            done.update(zip(b.positions.tolist(), numbers_of(b.images), strict=True))
    states = [stream.state_dict() for stream in streams]
    assert all(state == states[0] for state in states)
    for stream in ranks(place, world2, batch=batch2, seed=3):
        stream.load_state_dict(states[0])
        left = stream.batches_left
        rest = list(stream)
        assert len(rest) == left
        for b in rest:
            for place_, number in zip(b.positions.tolist(), numbers_of(b.images), strict=True):
                assert place_ < 0 or place_ not in done
                done[place_] = number
    done.pop(-1, None)
    assert [done[i] for i in range(total)] == expected


@properties
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum), st.integers(1, 100), st.integers(0, 5))
def test_the_order_is_a_permutation_for_uneven_shards(counts: list[int], window: int, epoch: int) -> None:
    order = Order(counts, seed=1, window=window)
    found = order.locate(epoch, 0, order.samples)
    assert sorted(found) == [(s, i) for s, count in enumerate(counts) for i in range(count)]
    middle = order.samples // 2
    assert order.locate(epoch, middle, order.samples - middle) == found[middle:]


def test_order_of_a_large_dataset_holds_one_window_only() -> None:
    order = Order([5000] * 2000, seed=0)
    places = order.locate(0, 4_999_000, 5000)
    assert len(set(places)) == 5000
    assert max(len(window) for window in order.windows(0)) == 14


def test_shuffled_by_seed_and_epoch(tmp_path: Path) -> None:
    write_numbered(tmp_path, [50] * 4)
    first, again, other = (list(_epochs(str(tmp_path), seed)) for seed in (0, 0, 1))
    assert first == again
    assert first[0] != other[0]
    assert first[0] != first[1]
    shards = [n // 50 for n in first[0]]
    assert len(set(shards[:20])) > 1, "a window mixes shards"
    assert epoch_of(tmp_path, shuffle=False) == list(range(200))


def _epochs(place: str, seed: int) -> Iterator[list[int]]:
    stream = open_stream(place, seed=seed)
    for _ in range(2):
        yield [n for batch in stream for n in numbers_of(batch.images)]


def test_small_windows_shuffle_shards_and_inside_them(tmp_path: Path) -> None:
    write_numbered(tmp_path, [20] * 10)
    order = epoch_of(tmp_path, window=40)
    firsts = [order[start] // 20 for start in range(0, 200, 40)]
    assert firsts != sorted(firsts)
    for start in range(0, 200, 40):
        window = order[start : start + 40]
        assert len({n // 20 for n in window}) == 2
        assert window != sorted(window)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loader_processes_change_nothing(tmp_path: Path, workers: int) -> None:
    write_numbered(tmp_path, [7] * 9)
    plain = open_stream(str(tmp_path), batch=5, flip=True)
    loaded = open_stream(str(tmp_path), batch=5, flip=True, workers=workers)
    for _ in range(2):
        for a, b in zip(plain, loaded, strict=True):
            assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
            assert torch.equal(a.positions, b.positions) and a.weight == b.weight


def test_resume_from_prefetching_loader_processes(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10] * 10)
    whole = epoch_of(tmp_path, batch=8)
    stream = open_stream(str(tmp_path), batch=8, workers=2)
    taken = [n for _, batch in zip(range(3), stream, strict=False) for n in numbers_of(batch.images)]
    fresh = open_stream(str(tmp_path), batch=4, workers=1)
    fresh.load_state_dict(stream.state_dict())
    assert taken + [n for batch in fresh for n in numbers_of(batch.images)] == whole
    rest = [n for batch in stream for n in numbers_of(batch.images)]
    assert taken + rest == whole, "breaking off and iterating again loses nothing either"


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(totals, shard_sizes, st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), batches, st.data())
def test_resume_across_numbers_of_loader_processes(
    folders: Folders, total: int, shard: int, world: int, workers: int, workers2: int, batch: int, data: st.DataObject
) -> None:
    place = folders(total, shard)
    whole = epoch_of(place, batch=total)
    done: dict[int, int] = {}
    for rank in range(world):
        stream = open_stream(place, batch=batch, rank=rank, world=world, workers=workers)
        stop = data.draw(st.shared(st.integers(0, stream.batches), key="stop"))
        fresh = open_stream(place, batch=batch, rank=rank, world=world, workers=workers2)
        first = [b for _, b in zip(range(stop), stream, strict=False)]
        fresh.load_state_dict(stream.state_dict())
        for b in (*first, *fresh):
            places = [place_ for place_ in b.positions.tolist() if place_ >= 0]
            assert not done.keys() & places
            done.update(zip(places, real(b), strict=True))
    assert [done[i] for i in range(total)] == whole


def test_a_killed_loader_process_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10] * 10)
    stream = open_stream(str(tmp_path), batch=2, workers=2)
    batches_ = iter(stream)
    next(batches_)
    assert stream._loaders is not None
    victim = stream._loaders.processes[1].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(UserError, match="loader process ended unexpectedly"):
        list(batches_)


def test_loader_processes_end_with_their_stream(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10])
    stream = open_stream(str(tmp_path), batch=2, workers=2)
    next(iter(stream))
    assert stream._loaders is not None
    processes = stream._loaders.processes
    del stream
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0


def test_global_random_state_is_left_alone(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10])
    before_torch, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    epoch_of(tmp_path, workers=1, flip=True)
    assert torch.equal(before_torch, torch.get_rng_state())
    assert (before_numpy == np.random.get_state()[1]).all()  # noqa: NPY002


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10])
    state = open_stream(str(tmp_path), seed=1).state_dict()
    with pytest.raises(UserError, match="seed 1, this stream has 2"):
        open_stream(str(tmp_path), seed=2).load_state_dict(state)
    with pytest.raises(UserError, match="dataset 'numbered'"):
        open_stream("mnist-sample", seed=1).load_state_dict(state)


def test_the_end_of_an_epoch_is_a_place_like_any_other(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10])
    stream = open_stream(str(tmp_path), batch=5)
    batches_ = iter(stream)
    next(batches_), next(batches_)
    state = stream.state_dict()
    assert (state["epoch"], state["position"]) == (0, 10)
    fresh = open_stream(str(tmp_path), batch=5)
    fresh.load_state_dict(state)
    fresh.set_epoch(0)
    assert list(fresh) == []
    assert (fresh.epoch, fresh.position) == (1, 0)


def test_a_rank_without_samples_gets_a_stand_in_or_nothing(tmp_path: Path) -> None:
    write_numbered(tmp_path, [5])
    training = [list(stream) for stream in ranks(str(tmp_path), 4, batch=1)]
    assert [[b.weight for b in row] for row in training] == [[1, 4], [1, 0], [1, 0], [1, 0]]
    assert training[3][1].images.shape == (1, 1, 4, 4) and training[3][1].positions.tolist() == [-1]
    evaluation = [list(stream) for stream in ranks(str(tmp_path), 4, batch=1, shuffle=False)]
    assert [len(row[1].images) for row in evaluation] == [1, 0, 0, 0]
    assert evaluation[3][1].images.shape == (0, 1, 4, 4)


def test_the_weighted_mean_over_ranks_is_the_mean_over_the_global_batch(tmp_path: Path) -> None:
    write_numbered(tmp_path, [23])
    for global_batch in zip(*ranks(str(tmp_path), 3, batch=4), strict=True):
        everyone = [n for b in global_batch for n in real(b)]
        means = [b.weight * np.mean(numbers_of(b.images)) for b in global_batch]
        assert np.mean(means) == pytest.approx(np.mean(everyone))


def test_splits_of_the_bundled_samples() -> None:
    for name, shape in (("cifar10-sample", (3, 32, 32)), ("mnist-sample", (1, 28, 28))):
        seen = set()
        for split, count in (("train", 384), ("validation", 64), ("test", 64), ("train+validation", 448)):
            stream = open_stream(name, split, shuffle=False)
            images = [batch.images for batch in stream]
            assert (stream.samples, stream.shape) == (count, shape)
            assert sum(map(len, images)) == count
            if "+" not in split:
                seen |= {image.numpy().tobytes() for image in torch.cat(images)}
        assert len(seen) == 512
    with pytest.raises(UserError, match=r"no split 'tset'.*train, validation, test"):
        open_stream("mnist-sample", "tset")


def test_resize_equals_pillow_and_flip_mirrors() -> None:
    plain = next(iter(open_stream("mnist-sample", batch=50)))
    large = next(iter(open_stream("mnist-sample", batch=50, resize=32)))
    for image, resized in zip(plain.images, large.images, strict=True):
        expected = Image.fromarray(image[0].numpy()).resize((32, 32), Image.Resampling.BILINEAR)
        assert np.array_equal(resized[0], np.asarray(expected))
    plain = next(iter(open_stream("cifar10-sample", batch=100)))
    flipped = next(iter(open_stream("cifar10-sample", batch=100, flip=True)))
    mirrored = [torch.equal(a.flip(-1), b) for a, b in zip(plain.images, flipped.images, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(plain.images, flipped.images, strict=True)]
    assert all(m or s for m, s in zip(mirrored, same, strict=True))
    assert 30 < sum(mirrored) < 70


@pytest.mark.parametrize(
    "options", [{"batch": 0}, {"rank": 2, "world": 2}, {"workers": -1}, {"on_bad_sample": "ignore"}, {"window": 0}]
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        open_stream("mnist-sample", **options)  # type: ignore[arg-type]
