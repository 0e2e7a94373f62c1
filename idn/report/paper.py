"""What the paper reports (Table 1): test data, nats for toy data, bits per dimension for images."""

from idn.flows.build import MODELS

DATASETS = {
    "circles": "2 circles",
    "checkerboard": "checkerboard",
    "moons": "2 moons",
    "mnist": "MNIST",
    "cifar10": "CIFAR10",
}
TABLE_1 = {
    "residual": {"circles": 3.44, "checkerboard": 3.81, "moons": 2.60, "mnist": 1.08, "cifar10": 3.42},
    "idensenet": {"circles": 3.32, "checkerboard": 3.68, "moons": 2.39, "mnist": 1.05, "cifar10": 3.41},
    "idensenet-lc": {"circles": 3.30, "checkerboard": 3.66, "moons": 2.39, "mnist": 1.04, "cifar10": 3.39},
}
ORDER = tuple(reversed(MODELS))
"""Best first, as on every dataset of the table."""
