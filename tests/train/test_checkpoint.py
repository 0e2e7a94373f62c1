"""Checkpoints count only when whole, on a local disk and on an object store's kind of filesystem."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
import pytest
import torch

from idn.errors import UserError
from idn.flows.build import build
from idn.train import checkpoint
from idn.train.checkpoint import Progress, Restored, Snapshot, checkpoint_name

INDEX = "checkpoint_manager_snapshot.json"


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    """A filesystem and an empty folder in it."""
    if request.param == "local":
        return pyarrow.fs.LocalFileSystem(), str(tmp_path / "run" / "checkpoints")
    memory = fsspec.filesystem("memory", skip_instance_cache=True)
    memory.store.clear()
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory)), "/run/checkpoints"


def snapshots(step: int, is_best: bool = False) -> list[Snapshot]:
    """What two ranks of a small flow would save: each half of every moment."""
    flow = build("moons", "idensenet-lc", "tiny")
    ema = {name: p.detach() + 1 for name, p in flow.named_parameters()}
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, parameter in flow.named_parameters():
        cut = parameter.numel() // 2
        for key, offset in (("exp_avg", 0), ("exp_avg_sq", 1000)):
            whole = torch.arange(parameter.numel(), dtype=torch.float32) + offset
            halves[0][f"{key}@0@{name}"], halves[1][f"{key}@{cut}@{name}"] = whole[:cut].clone(), whole[cut:].clone()
    progress = Progress(step=step, updates=step, best=1.5, feed={"toy": "moons", "step": step})
    return [
        Snapshot(progress, {"name": "test"}, rank, 2, halves[rank], flow if rank == 0 else None, ema, is_best)
        for rank in (0, 1)
    ]


def save(storage: tuple[Any, str], step: int, ranks: tuple[int, ...] = (0, 1), is_best: bool = False) -> str:
    filesystem, folder = storage
    pair = snapshots(step, is_best)
    return [checkpoint.write(pair[rank], filesystem, folder, checkpoint_name(step, "aa")) for rank in ranks][-1]


def test_what_was_written_comes_back(storage: tuple[Any, str]) -> None:
    save(storage, 5)
    path = save(storage, 10, is_best=True)
    filesystem, folder = storage
    assert checkpoint.newest(filesystem, folder) == path
    restored = Restored(filesystem, path)
    assert restored.progress.step == 10 and restored.progress.feed == {"toy": "moons", "step": 10}
    original = build("moons", "idensenet-lc", "tiny")
    for name, parameter in original.named_parameters():
        assert torch.equal(restored.flow.get_parameter(name), parameter)
        assert torch.equal(restored.ema[name], parameter + 1)
        moments = restored.moments()[name]
        assert torch.equal(moments["exp_avg"], torch.arange(parameter.numel(), dtype=torch.float32))
        assert torch.equal(moments["exp_avg_sq"], moments["exp_avg"] + 1000)
    best = f"{folder.rsplit('/', 1)[0]}/best.safetensors"
    assert filesystem.get_file_info(best).size > 0


def test_a_save_cut_short_is_passed_over_and_cleared(storage: tuple[Any, str]) -> None:
    filesystem, folder = storage
    whole = save(storage, 5)
    half = save(storage, 10, ranks=(0,))
    assert checkpoint.newest(filesystem, folder) == whole
    assert not checkpoint.is_whole(filesystem, half)
    checkpoint.tidy(filesystem, folder)
    assert checkpoint.list_checkpoints(filesystem, folder) == [whole]


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_file_disqualifies_its_checkpoint(storage: tuple[Any, str], damage: str) -> None:
    filesystem, folder = storage
    older, newer = save(storage, 5), save(storage, 10)
    victim = f"{newer}/optimizer-00001-of-00002.safetensors"
    with filesystem.open_input_stream(victim) as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    if damage == "gone":
        filesystem.delete_file(victim)
    else:
        with filesystem.open_output_stream(victim) as file:
            file.write(bytes(content if damage == "flipped" else content[:-9]))
    assert checkpoint.newest(filesystem, folder) == older


def test_fragments_that_do_not_cover_a_parameter_are_an_error(storage: tuple[Any, str]) -> None:
    path = save(storage, 5)
    restored = Restored(storage[0], path)
    restored._shards = restored._shards[:1]
    with pytest.raises(UserError, match="incomplete"):
        restored.moments()


def test_rays_index_is_dropped_when_it_lies_and_kept_when_it_is_right(storage: tuple[Any, str]) -> None:
    filesystem, folder = storage
    first, second, third = (save(storage, step) for step in (5, 10, 15))

    def write_index(content: str) -> None:
        with filesystem.open_output_stream(f"{folder}/{INDEX}") as file:
            file.write(content.encode())

    def index_is_there() -> bool:
        return filesystem.get_file_info(f"{folder}/{INDEX}").type == pyarrow.fs.FileType.File

    names = [{"checkpoint_dir_name": path.rsplit("/", 1)[1]} for path in (second, third)]
    write_index(json.dumps({"checkpoint_results": names}))
    checkpoint.tidy(filesystem, folder)
    assert index_is_there()
    assert checkpoint.list_checkpoints(filesystem, folder) == [second, third]
    write_index(json.dumps({"checkpoint_results": names})[:-20])
    checkpoint.tidy(filesystem, folder)
    assert not index_is_there()
    assert checkpoint.list_checkpoints(filesystem, folder) == [third]
    assert first != second


def test_nothing_saved_means_nothing_found(storage: tuple[Any, str]) -> None:
    assert checkpoint.newest(*storage) is None
    checkpoint.tidy(*storage)
