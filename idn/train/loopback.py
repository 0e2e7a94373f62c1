"""A Ray on this machine that the network cannot reach."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants


@contextmanager
def loopback_only() -> Iterator[None]:
    """Ray replaces 127.0.0.1 by the machine's address and listens on all interfaces, asked or not.

    It stays on loopback where it takes clusters to be impossible, by its switch for Windows and macOS. The processes
    that it starts read the switch from the environment.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[0]
        del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        if before[1] is not None:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = before[1]
