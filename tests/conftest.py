"""What every test shares: one thread, so that figures repeat, and small flows with trained-like weights."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("idn", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("idn")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
