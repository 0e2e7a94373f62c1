"""Every test has a cache and a data root of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IDN_DATA", str(tmp_path / "data"))
