"""Makes the bundled samples from prepared datasets: `python -m idn.data.samples.make cifar10 mnist`."""

import sys
from pathlib import Path

import numpy as np

from idn.data.shards import Split, hold_out, write_dataset


def sample_of(train: Split, test: Split) -> dict[str, Split]:
    """512 images: 384 to train and 64 to validate from the train set's first 448, the first 64 of the test set."""
    rest, held = hold_out(train.take(np.arange(448)), share=1 / 7)
    return {"train": rest, "validation": held, "test": test.take(np.arange(64))}


if __name__ == "__main__":
    from idn.data.sources import get

    for name in sys.argv[1:]:
        splits = get(name, "auto")
        out = Path(__file__).parent / f"{name}-sample"
        write_dataset(str(out), f"{name}-sample", sample_of(*splits), classes=10, shard_samples=96, packed=True)
