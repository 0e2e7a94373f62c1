"""The short form of what tests/cluster does at length: one run across two real Ray nodes."""

from pathlib import Path

import pyarrow.fs
import pytest

from idn.train import checkpoint
from tests.cluster.ledgers import EPOCH, check_once
from tests.cluster.nodes import real_nodes

LOCAL = pyarrow.fs.LocalFileSystem()


@pytest.mark.cluster
def test_a_run_spans_nodes_and_keeps_ranks_samples_and_storage_in_order(tmp_path: Path) -> None:
    with real_nodes(60, 2, tmp_path) as nodes:
        steps = EPOCH + 1
        nodes.finish("--name", "span", "--workers", "2", "--zero", "1", "--steps", str(steps))
        (begun,) = nodes.records("span", "start")
        # A worker each, and each the first of its machine: local ranks choose devices.
        assert sorted(begun["places"]) == [[0, 0], [1, 0]] and begun["workers"] == 2
        assert "2 workers on 2 nodes" in nodes.log()
        assert sorted(nodes.losses("span")) == list(range(1, steps + 1))
        # An epoch and its turn: the ranks' shares are disjoint and leave nothing out.
        assert check_once(tmp_path / "span-ledger", steps) == 1
        path = checkpoint.newest(LOCAL, str(tmp_path / "span" / "checkpoints"))
        assert path is not None
        names = {info.base_name for info in LOCAL.get_file_info(pyarrow.fs.FileSelector(path))}
        assert {f"optimizer-0000{rank}-of-00002.safetensors" for rank in (0, 1)} <= names
        restored = checkpoint.Restored(LOCAL, path)
        assert restored.progress.step == steps and restored.moments()
