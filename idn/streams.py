"""Random streams as pure functions of what they are for; nothing here touches global state."""

import hashlib

import torch


def stream_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed for the stream that `key` names.

    >>> stream_seed(0, "noise", 1, 2) == stream_seed(0, "noise", 1, 2)
    True
    >>> stream_seed(0, "noise", 1, 2) == stream_seed(0, "noise", 12)
    False
    """
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream(seed: int, *key: int | str) -> torch.Generator:
    """A generator that starts where (seed, key) says, for example `stream(seed, "noise", rank, step)`."""
    return torch.Generator().manual_seed(stream_seed(seed, *key))
