"""The run on a Ray cluster; no other module knows Ray.

Workers are Ray Train (V2) workers. Rank 0 sends its records to a small actor, from which the driver takes them for the
progress bar and TensorBoard; the actor's answer carries the driver's wish to stop back.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import idn
from idn.errors import UserError
from idn.train import checkpoint, ledger, relay, session, worker
from idn.train.config import TrainConfig
from idn.train.group import Group
from idn.train.placement import Plan, fit
from idn.train.relay import Record, Relay
from idn.train.runs import checkpoint_storage
from idn.train.storage import advice, refusal

# Read by Ray Train when it is imported or when a run starts.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
# After a node's death Ray waits so long for a new one before it goes on with fewer workers.
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import ray.train
import ray.train.torch
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.execution.callback import WorkerCallback
from ray.train.v2._internal.execution.context import get_train_context

from idn.train.loopback import loopback_only
from idn.train.recovery import FreshNodes, take_over
from idn.train.rendezvous import Meeting

CHECKPOINTS = "checkpoints"
POLL = 0.25
RESIZE = 20.0
"""Seconds between looks for nodes that came back, where the number of workers is a range."""
ray_train: Any = ray.train
"""Train V2, whose types checkers take for those of V1."""
# Sent by value: by reference its process would import all of idn, and torch with it.
ray.cloudpickle.register_pickle_by_value(relay)


class TrainingFailed(Exception):
    """The run ended without finishing, for a reason that is not the user's input."""


# --- Cluster ----------------------------------------------------------------------------------------------------


@contextmanager
def cluster(wanted: str | None) -> Iterator[None]:
    """Joins the cluster at an address (or RAY_ADDRESS), or starts a private one and ends it afterwards."""
    if ray.is_initialized():
        yield
        return
    address = wanted or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {}
    if address == "local":
        options = {"include_dashboard": False}
        # Nobody drains the only node.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    with loopback_only() if address == "local" else nullcontext():
        try:
            knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"--address {address}: no Ray cluster answers there ({first_line(error)})") from error
        except Exception as error:
            # Ray has no type of its own for a start that took too long, as on a machine that is busy beyond measure.
            raise TrainingFailed(f"Ray did not start: {first_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


def knock(address: str) -> None:
    """An address host:port must take a connection; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def plan(config: TrainConfig, note: Callable[[str], None]) -> Plan:
    """Workers that the cluster can hold, after waiting for them if asked to."""
    deadline = time.monotonic() + config.cluster.wait
    told = False
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        try:
            return fit(config, nodes)
        except UserError as error:
            if time.monotonic() >= deadline:
                raise
            if not told:
                note(f"waiting up to {config.cluster.wait:.0f} s: {error}")
                told = True
            time.sleep(1.0)


# --- Driver -----------------------------------------------------------------------------------------------------


def run(config: TrainConfig, plan: Plan, on_record: Callable[[Record], None], note: Callable[[str], None]) -> Record:
    """Trains and returns rank 0's last word; signals ask for a checkpoint and an early end."""
    post: Any = ray.remote(num_cpus=0)(Relay).remote()
    get_or_create_autoscaling_coordinator()  # Ray Train would wait for this one later on
    trainer = make_trainer(config, plan, post)
    outcome: list[Record] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(dict(trainer.fit().return_value or {}))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="ray-train", daemon=True)
    with SignalWatch(lambda: post.stop.remote(), note) as signals:
        thread.start()
        while thread.is_alive():
            thread.join(POLL)
            for record in ray.get(post.take.remote()):
                on_record(record)
    for record in ray.get(post.take.remote()):
        on_record(record)
    fatal: str | None = ray.get(post.fatal.remote()) or (outcome[0].get("error") if outcome else None)
    if fatal:
        raise UserError(fatal) if not fatal.startswith("step ") else TrainingFailed(fatal)
    if failure:
        # Ray keeps an index beside the checkpoints and may be the first to find that it cannot be written.
        words = refusal(failure[0])
        place = f"{checkpoint_storage(config)}/{CHECKPOINTS}"
        told = f"no checkpoint, {advice(words, place)}" if words else first_line(failure[0])
        raise TrainingFailed(told) from failure[0]
    return outcome[0] | {"signal": signals.caught}


class SignalWatch:
    """SIGTERM and the first Ctrl-C ask for a checkpoint and an end; the second Ctrl-C ends at once."""

    def __init__(self, stop: Callable[[], Any], note: Callable[[str], None]) -> None:
        self.caught: int | None = None
        self._stop, self._note = stop, note
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.caught is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = number
        self._note(f"{signal.Signals(number).name}: stopping after a checkpoint")
        self._stop()


class Trainer(ray_train.torch.TorchTrainer):  # type: ignore[misc]
    """Ray Train without Ray Data, whose manager would take seconds to start."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, DatasetsCallback)]


def make_trainer(config: TrainConfig, plan: Plan, relay: Any) -> Any:
    """Our settings in Ray Train's words."""
    resources = {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
    settings = {"config": config.to_dict(), "relay": relay, "versions": versions(), "environment": environment()}
    trainer = Trainer(
        worker_main,
        train_loop_config=settings,
        torch_config=Meeting(backend="nccl" if plan.gpus else "gloo"),
        scaling_config=ray_train.ScalingConfig(
            num_workers=plan.most if plan.fewest == plan.most else (plan.fewest, plan.most),
            use_gpu=plan.gpus > 0,
            resources_per_worker=resources,
            elastic_resize_monitor_interval_s=RESIZE,
        ),
        run_config=run_config(config),
    )
    take_over(trainer, checkpoint_storage(config))
    return trainer


def run_config(config: TrainConfig) -> Any:
    """Where checkpoints go, how many stay, how many failures are forgiven."""
    return ray_train.RunConfig(
        name=CHECKPOINTS,
        storage_path=checkpoint_storage(config),
        failure_config=ray_train.FailureConfig(max_failures=config.cluster.max_failures),
        checkpoint_config=ray_train.CheckpointConfig(num_to_keep=config.saving.keep),
        callbacks=[CatchTerm(), FreshNodes()],
        logging_config=ray_train.LoggingConfig(log_level="ERROR"),
    )


def prepare_storage(config: TrainConfig) -> None:
    """Proves that checkpoints can be written, and clears what a crash left half done."""
    try:
        storage = run_config(config).storage_context
        filesystem, folder = storage.storage_filesystem, storage.experiment_fs_path
        filesystem.create_dir(folder, recursive=True)
        with filesystem.open_output_stream(f"{folder}/.writable") as file:
            file.write(b"")
        filesystem.delete_file(f"{folder}/.writable")
    except Exception as error:
        raise UserError(f"storage {checkpoint_storage(config)}: cannot be written ({first_line(error)})") from error
    checkpoint.tidy(filesystem, folder)


def versions() -> dict[str, str]:
    """What must be the same on all machines."""
    return {"idn": idn.__version__, "torch": torch.__version__, "ray": ray.__version__}


def environment() -> dict[str, str]:
    """The driver's folders, which are the workers' too."""
    from idn.data.locate import data_root

    folders = {"IDN_DATA": str(data_root())}
    if chosen := os.environ.get(ledger.VARIABLE):
        folders[ledger.VARIABLE] = chosen
    return {name: str(Path(folder).absolute()) for name, folder in folders.items()}


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


# --- Worker -----------------------------------------------------------------------------------------------------

terminated = threading.Event()
"""Set when this worker process has received SIGTERM."""


class CatchTerm(WorkerCallback):
    """Runs in each worker's main thread, the only one that may set a signal handler."""

    def after_init_train_context(self) -> None:
        terminated.clear()
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())


class RayPort:
    """The loop's way out: records to the relay, checkpoints to Ray's storage."""

    def __init__(self, relay: Any, rank: int) -> None:
        self._relay, self._rank = relay, rank
        self._answer: Any = None
        self._stop = False
        self._written = threading.Event()
        self._written.set()
        self.storage = ray_train.get_context().get_storage()

    def send(self, record: Record) -> None:
        if self._rank == 0:
            self._collect_answer()
            self._answer = self._relay.put.remote(record)

    def stop_wanted(self) -> int:
        self._collect_answer()
        # Ray marks workers whose node is about to be drained.
        preempted = get_train_context().preemption_context.preemption_info is not None
        return 2 if preempted or terminated.is_set() else int(self._stop)

    def save(self, snapshot: checkpoint.Snapshot, name: str, metrics: Record) -> None:
        filesystem, folder = self.storage.storage_filesystem, self.storage.experiment_fs_path

        def upload(_: Any, name: str) -> Any:
            try:
                return ray_train.Checkpoint(checkpoint.write(snapshot, filesystem, folder, name), filesystem)
            except Exception as error:
                # Anything else, such as a network that fails, may be gone when Ray starts the workers again.
                if words := refusal(error):
                    at = f"step {snapshot.progress.step}, rank {self._rank}: no checkpoint"
                    ray.get(self._relay.fail.remote(f"{at}, {advice(words, folder)}"))
                raise
            finally:
                self._written.set()

        self._written.clear()
        ray_train.report(
            metrics,
            checkpoint=ray_train.Checkpoint(f"{folder}/{name}", filesystem),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray_train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
            # The "local" copy is the one in its final place.
            delete_local_checkpoint_after_upload=False,
        )

    def flush(self) -> None:
        self._written.wait()

    def _collect_answer(self) -> None:
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self._stop = self._stop or bool(ray.get(self._answer))
            self._answer = None


def worker_main(settings: Record) -> Record:
    """What Ray runs in every worker."""
    relay = settings["relay"]
    if fatal := ray.get(relay.fatal.remote()):
        return {"error": fatal}
    context = ray_train.get_context()
    rank = context.get_world_rank()
    try:
        check_versions(settings["versions"])
        os.environ.update(settings["environment"])
        config = TrainConfig.from_dict(settings["config"])
        place = context.get_node_rank(), context.get_local_rank()
        group = Group(rank, context.get_world_size(), ray_train.torch.get_device(), *place)
        port = RayPort(relay, rank)
        opened = session.open_session(config, group, port.storage.storage_filesystem, port.storage.experiment_fs_path)
        return worker.train(opened, port)
    except worker.NotFinite as error:
        # All ranks came to the same end, and trying again would too.
        return {"error": str(error)}
    except UserError as error:
        # Said before the other ranks notice: the restarted workers find it and give up.
        ray.get(relay.fail.remote(f"rank {rank}: {error}"))
        raise


def check_versions(expected: dict[str, str]) -> None:
    """Refuse a machine that runs other software than the driver."""
    for package, version in versions().items():
        if version != expected[package]:
            raise UserError(f"worker on {os.uname().nodename} has {package} {version}, the driver {expected[package]}")
