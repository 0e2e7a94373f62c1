"""A private Slurm on this machine: a controller and two nodes with a loopback address each, as the calling user."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
HOW = "needs Slurm, which the test does not install: apt-get install slurm-wlm munge, then pytest -m slurm"
NODES = {"node1": "127.0.0.21", "node2": "127.0.0.22"}

CONFIG = """\
ClusterName=idn
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
KillWait=20
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 OverSubscribe=NO
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Programs that this machine lacks; Debian keeps the daemons outside a user's PATH."""
    return [name for name in PROGRAMS if not find(name)]


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Slurm:
    """Commands of the private installation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, **variables: str) -> str:
        done = subprocess.run(
            words, env=self.environment | variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        words = self.call("scontrol", "show", "job", job, "--oneliner").split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.3)
        return False


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Starts munged, slurmctld and two slurmd, and ends them by their process ids."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    nodes = [
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={address} Port={free_port()} CPUs=1 "
        "RealMemory=1000 State=UNKNOWN"
        for name, address in NODES.items()
    ]
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder, "controller": free_port()}
    (folder / "slurm.conf").write_text(CONFIG.format(nodes="\n".join(nodes), **values))
    slurm = Slurm(folder)
    # The socket's folder is in /tmp, which everybody may write: munge asks for --force there.
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    commands = [["munged", "--foreground", "--force", *munge]]
    commands += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(
                    subprocess.Popen(
                        [str(find(command[0])), *command[1:]], env=slurm.environment, stdout=log, stderr=log
                    )
                )
            time.sleep(1.0)
        idle = slurm.wait(lambda: set(slurm.call("sinfo", "-hN", "-o", "%T").split()) == {"idle"}, 60)
        assert idle, slurm.call("sinfo")
        yield slurm
    finally:
        # Jobs outlive the daemons.
        with contextlib.suppress(AssertionError):
            slurm.call("scancel", "--full", f"--user={getpass.getuser()}")
            slurm.wait(lambda: not slurm.call("squeue", "-h"), 60)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=60)
