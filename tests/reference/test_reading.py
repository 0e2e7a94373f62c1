"""Reading a checkpoint never runs it, and says in one line what is wrong with a bad one."""

import argparse
import contextlib
import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idn.errors import UserError
from idn.reference.checkpoint import read_checkpoint
from idn.reference.pickles import Global, Inert, PickleError, read_pickle


def attacks(command: str) -> dict[str, bytes]:
    """Pickles that run `command` when Python's own unpickler reads them, one for each way to make a call."""
    text = command.encode()
    namespace = b"\x80\x02cargparse\nNamespace\n)\x81"
    return {
        "REDUCE": b"cos\nsystem\n(S'" + text + b"'\ntR.",
        "INST": b"(S'" + text + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + text + b"'\no.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'" + text + b"'\ntR.",
        "BUILD": namespace + b"}S'__setstate__'\ncos\nsystem\nsbS'" + text + b"'\nb.",
        "NEWOBJ_EX": b"\x80\x04cidn_test_victim\nVictim\n(S'" + text + b"'\nt}\x92.",
        "nested": b"\x80\x02}U\x03key]cos\nsystem\n(S'" + text + b"'\ntR\x85as.",
        "called result": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'" + text + b"'\ntR.",
    }


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class on the path whose __new__ runs its argument."""

    class Victim:
        def __new__(cls, command: str) -> "Victim":
            import os

            os.system(command)
            return object.__new__(cls)

    monkeypatch.setitem(sys.modules, "idn_test_victim", argparse.Namespace(Victim=Victim))  # type: ignore[misc]


def as_zip(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3")
    return path


@pytest.mark.parametrize("attack", attacks(""))
def test_no_pickle_runs(attack: str, tmp_path: Path, victim: None) -> None:
    marker = tmp_path / "marker"
    data = attacks(f"touch {marker}")[attack]
    pickle.loads(data)
    assert marker.exists(), "the attack does not work, so this test would show nothing"
    marker.unlink()

    read_pickle(io.BytesIO(data))
    with pytest.raises(UserError, match="expected"):
        read_checkpoint(as_zip(tmp_path / "attack.pth", data))
    (tmp_path / "legacy.pth").write_bytes(data)
    with pytest.raises(UserError, match="expected"):
        read_checkpoint(tmp_path / "legacy.pth")
    assert not marker.exists()


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_good_tensors_beside_malice_are_read_and_the_malice_stays_inert(tmp_path: Path, zipped: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "file.pth"
    weight = torch.arange(6.0).view(2, 3)
    ema = argparse.Namespace(shadow_params={"w": weight + 1}, module=Malicious(marker))
    content = {
        "state_dict": OrderedDict(w=weight),
        "args": argparse.Namespace(coeff=0.9, x=Malicious(marker)),
        "ema": ema,
    }
    torch.save(content, path, _use_new_zipfile_serialization=zipped)

    checkpoint = read_checkpoint(path)
    assert torch.equal(checkpoint.state["w"], weight)
    assert torch.equal(checkpoint.ema["w"], weight + 1)
    assert checkpoint.args["coeff"] == 0.9
    assert isinstance(checkpoint.args["x"], Inert) and checkpoint.args["x"].name.endswith(".system")
    assert not marker.exists()


def test_a_named_module_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "idn_side_effect.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_pickle(io.BytesIO(b"cidn_side_effect\nThing\n.")) == Global("idn_side_effect.Thing")
    assert "idn_side_effect" not in sys.modules


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    # Below protocol 3 Python writes bytes as a call, which stays one here.
    expected = pickle.loads(data) if b"_codecs" not in data and b"bytes" not in data else None
    read = read_pickle(io.BytesIO(data))
    assert expected is None or read == expected


@given(data=st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_pickle_error(data: bytes) -> None:
    with contextlib.suppress(PickleError):
        read_pickle(io.BytesIO(data))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_both_formats(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(20.0).view(4, 5)
    state = {
        "contiguous": base,
        "transposed view": base[1:3].t(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "double": torch.tensor([1.5], dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "file.pth"
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in state.items()}},
        path,
        _use_new_zipfile_serialization=zipped,
    )
    read = read_checkpoint(path).state
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, bytes]:
    """A small valid file in the new (True) and the old (False) format."""
    files = {}
    for zipped in (True, False):
        path = tmp_path_factory.mktemp("good") / "file.pth"
        content = {"state_dict": {"w": torch.arange(64.0)}, "args": argparse.Namespace(coeff=0.9)}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        files[zipped] = path.read_bytes()
    return files


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_file_that_was_cut_short(good: dict[bool, bytes], tmp_path: Path, zipped: bool, kept: float) -> None:
    path = tmp_path / "cut.pth"
    path.write_bytes(good[zipped][: int(len(good[zipped]) * kept)])
    with pytest.raises(UserError, match=r"cut\.pth: damaged or foreign file") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(zipped=st.booleans(), place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_byte_never_gives_anything_but_a_user_error(
    good: dict[bool, bytes], tmp_path_factory: pytest.TempPathFactory, zipped: bool, place: float, byte: int
) -> None:
    data = bytearray(good[zipped])
    data[int(place * len(data))] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.pth"
    path.write_bytes(data)
    try:
        read_checkpoint(path)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html>Not found</html>", "web page"),
        (b"\n  <html>", "web page"),
        (b"\x89PNG\r\n\x1a\n", "damaged or foreign"),
        (b"hello, world\n", "damaged or foreign"),
        (pickle.dumps({"state_dict": {}}), "does not begin as"),
        (b"PK\x03\x04 and no more", "damaged or foreign"),
        (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "damaged or foreign"),
    ],
)
def test_foreign_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.pth"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(path)
    assert "foreign.pth" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.pth: cannot be read"):
        read_checkpoint(tmp_path / "nowhere.pth")
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_a_zip_that_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match=r"without data\.pkl"):
        read_checkpoint(tmp_path / "other.zip")


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    path = as_zip(tmp_path / "bomb.pth", pickle.dumps("0" * 10**6), zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="compressed"):
        read_checkpoint(path)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((1000,), (1,), 0),
        ((4,), (1,), 2),
        ((2, 2), (4, 1), 0),
        ((4,), (0,), 4),
        ((10**9,), (0,), 0),
        ((-1,), (1,), 0),
        ((2,), (-1,), 1),
    ],
)
def test_a_tensor_that_reaches_outside_its_storage(
    tmp_path: Path, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    """The description is written into the pickle by hand; torch itself would not write it."""

    class Outside:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            from torch._utils import _rebuild_tensor_v2

            return _rebuild_tensor_v2, (
                torch.arange(4.0).storage(),
                offset,
                size,
                stride,
                False,
                OrderedDict(),
            )

    path = tmp_path / "outside.pth"
    torch.save({"state_dict": {"w": Outside()}}, path)
    with pytest.raises(UserError, match="damaged or foreign file: a tensor of size"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a value of type list, expected a dict with 'state_dict'"),
        ({"model": {}, "epoch": 3}, "holds a dict of 'model', 'epoch', expected"),
        ({"state_dict": 3}, "state_dict: holds a value of type int, expected tensors by name"),
        ({"state_dict": {"w": "text"}}, "'w' is a value of type str, expected a tensor"),
    ],
)
def test_other_content(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(UserError, match=message):
        read_checkpoint(tmp_path / "other.pth")
