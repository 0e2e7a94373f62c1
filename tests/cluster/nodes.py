"""Real Ray nodes with a loopback address each, the `idn` command on them, and what its runs leave behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

COMMAND = str(Path(sys.executable).with_name("idn"))
SAMPLES = 384
"""Images of the bundled sample, all different."""
BATCH = 30
"""Divides among one, two or three workers, and leaves a shorter last batch."""
WORDS = f"train cifar10-sample --size tiny --flow.shape 3 8 8 --resize 8 --flow.blocks 1 1 --batch {BATCH} --no-flip "
WORDS += "--log-every 1 --checkpoint-every 5 --validate-every 0 --picture-every 0 --limit-test 24 --deterministic "
WORDS += "--max-failures -1"
PATIENCE = 600.0
"""Seconds; a busy machine is slow, not wrong."""


class Nodes:
    """A head that trains nothing, nodes with room for one worker each, and the drivers started on them."""

    def __init__(self, network: int, count: int, runs: Path, dashboard: bool) -> None:
        self.runs, self._network, self._made = runs, network, 0
        self._drivers: list[subprocess.Popen[str]] = []
        # Ray would run workers at the lowest priority, where other work on the machine starves them.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        head = {"num_cpus": 0, "node_ip_address": self._address(), "include_dashboard": dashboard}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.members = [self.join() for _ in range(count)]

    def _address(self) -> str:
        self._made += 1
        return f"127.0.{self._network}.{self._made}"

    def join(self) -> Any:
        """One more node."""
        return self.cluster.add_node(num_cpus=1, node_ip_address=self._address())

    def lose(self) -> None:
        """Kills the newest node without a word."""
        self.cluster.remove_node(self.members.pop(), allow_graceful=False)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """`idn train` of the small run; what it prints goes to a log."""
        variables = {"RAY_ADDRESS": self.cluster.address, "IDN_RUNS": str(self.runs), "OMP_NUM_THREADS": "1"}
        name = words[words.index("--name") + 1]
        variables["IDN_LEDGER"] = str(self.runs / f"{name}-ledger")
        with (self.runs / "log").open("a") as log:
            process = subprocess.Popen(
                [COMMAND, *WORDS.split(), *words], env=os.environ | variables, text=True, stdout=log, stderr=log
            )
        self._drivers.append(process)
        return process

    def finish(self, *words: str) -> None:
        """A run to its end."""
        assert self.start(*words).wait(2 * PATIENCE) == 0, self.log()

    def end_early(self, process: "subprocess.Popen[str]") -> None:
        """SIGTERM: a checkpoint, then the end."""
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM, self.log()

    def log(self) -> str:
        return (self.runs / "log").read_text()

    def wait(self, condition: Callable[[], bool], process: "subprocess.Popen[str]") -> float:
        """Seconds until the condition held."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            if condition():
                return time.monotonic() - began
            assert process.poll() is None, self.log()
            time.sleep(0.1)
        raise AssertionError(f"waited in vain:\n{self.log()}")

    def workers(self) -> list[psutil.Process]:
        """Training processes of these nodes, and of no other on the machine."""
        found = []
        for node in self.cluster.list_all_nodes():
            for info in node.all_processes["raylet"]:
                with contextlib.suppress(psutil.Error):
                    children = psutil.Process(info.process.pid).children(recursive=True)
                    found += [child for child in children if "RayTrainWorker" in command_line(child)]
        return found

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Lines of a run's metrics.jsonl."""
        path = self.runs / name / "metrics.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            # The last line may be half written.
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [record for record in found if record["kind"] == kind]

    def last(self, name: str, kind: str) -> dict[str, Any]:
        return (self.records(name, kind) or [{"step": 0, "workers": 0}])[-1]

    def losses(self, name: str) -> dict[int, float]:
        return {record["step"]: record["value"] for record in self.records(name, "metrics")}

    def close(self) -> None:
        for process in self._drivers:
            process.kill()
            process.wait()
        self.cluster.shutdown()


@contextlib.contextmanager
def real_nodes(network: int, count: int, runs: Path, dashboard: bool = False) -> Iterator[Nodes]:
    """Nodes for a test, ended after it; each test has a network of its own, 127.0.NETWORK.

    The dashboard takes seconds to start. Ray asks it which drivers are dead, to clear up after them.
    """
    nodes = Nodes(network, count, runs, dashboard)
    try:
        yield nodes
    finally:
        nodes.close()


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
