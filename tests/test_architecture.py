"""Who may import whom."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "idn"
STANDARD_AND_OWN = {"idn.errors", "idn.streams", "idn.flows"}


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module}
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    part = file.relative_to(PACKAGE).parts[0]
    names = imported(file)
    if part == "flows":
        own = {name for name in names if name.split(".")[0] == "idn"}
        assert all(any(name == ok or name.startswith(ok + ".") for ok in STANDARD_AND_OWN) for name in own), own
        third_party = {name.split(".")[0] for name in names} & {"numpy", "scipy", "PIL", "matplotlib", "fsspec", "tqdm"}
        assert not third_party
    if part == "data":
        assert not {name for name in names if name.startswith("idn.train")}
    if part != "train":
        assert not {name for name in names if name.split(".")[0] in ("ray", "deepspeed")}


def test_files_stay_short():
    long = {str(f.relative_to(PACKAGE)): n for f in FILES if (n := len(f.read_text().splitlines())) > 400}
    assert not long
