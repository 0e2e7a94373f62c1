"""A flow that was really trained: tests/fixtures/moons, the run that its command.txt makes, with known nats.

Only parameters are kept: singular vectors follow from them, so the fixture outlives changes in how norms are tracked.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from idn.flows.flow import Flow
from idn.models import read_settings
from idn.train.config import TrainConfig

FIXTURE = Path(__file__).parent / "fixtures" / "moons"
KNOWN_NATS = 2.887
"""On 100,000 points, as measured right after training."""


def moons_run(parent: Path) -> Path:
    """The run's folder, as training leaves it, under `parent`."""
    folder = parent / "moons-tiny-idensenet-lc"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(FIXTURE / name, folder)
    flow = Flow(TrainConfig.from_dict(read_settings(folder)).flow)
    parameters = load_file(FIXTURE / "parameters.safetensors")
    assert set(parameters) == {name for name, _ in flow.named_parameters()}
    flow.load_state_dict(parameters, strict=False)
    flow.update_norms(100)
    flow.save(folder / "best.safetensors")
    return folder
