"""The data a run needs: there, or fetched, and of the shape that the flow expects."""

import sys

from idn.errors import UserError
from idn.train.config import TrainConfig
from idn.train.feed import is_toy, open_images

PREPARABLE = ("cifar10", "mnist", "fashion-mnist")


def require_data(config: TrainConfig) -> None:
    """Opens the training split once; a dataset that can be fetched is prepared when it is missing."""
    if is_toy(config):
        return
    try:
        stream = open_images(config, config.data.split, 1, 0, 1, shuffle=False)
    except UserError:
        if config.dataset not in PREPARABLE:
            raise
        from idn.data.commands import prepare

        print(f"{config.dataset} is not here yet: preparing it", file=sys.stderr, flush=True)
        prepare(config.dataset)  # type: ignore[arg-type]
        stream = open_images(config, config.data.split, 1, 0, 1, shuffle=False)
    shape = tuple(stream.shape)
    if shape != config.flow.shape:
        wanted = "x".join(map(str, config.flow.shape))
        given = "x".join(map(str, shape))
        raise UserError(f"{config.dataset} has {given} images, the flow expects {wanted}: add --resize or --flow.shape")
