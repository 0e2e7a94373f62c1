# `just` lists what can be done. Every recipe that needs the environment makes it first.

python := env("PYTHON", "python3")
bin := justfile_directory() / ".venv/bin"
export PATH := bin + ":" + env("PATH")

_default:
    @just --list

# Make .venv with the pinned versions
setup: _env

_env:
    @cluster/environment.sh {{ python }}

# Train on this machine: bundled CIFAR10 sample by default; e.g. just train-local mnist, just train-local cifar10 --size paper
train-local dataset="cifar10-sample" *options: _env
    @idn train {{ dataset }} --size tiny --workers 2 {{ options }}

# Look at all runs
tensorboard *options: _env
    @tensorboard --logdir runs {{ options }}

# Start a Ray cluster on this machine: job server on loopback, token required
cluster-up *options: _env
    @cluster/local.sh up {{ options }}

# End the cluster that cluster-up started
cluster-down: _env
    @cluster/local.sh down

# Send a training job to the cluster, e.g. just submit cifar10 --size tiny
submit name *options: _env
    @cluster/local.sh submit {{ name }} {{ options }}

# Run the tests (marked slow ones apart)
test *args: _env
    @pytest {{ args }}

# Run the tests that take minutes each
test-slow *args: _env
    @pytest -m slow {{ args }}

# Style and types
lint: _env
    @ruff check . && ruff format --check . && mypy

# Cost of Ray and DeepSpeed: a step under them against a bare loop
bench-framework *options: _env
    @python -m tests.train.bench_framework {{ options }}

# Two real steps of every preset of the paper, full sizes included
test-presets: _env
    @pytest -m slow tests/train/test_presets.py
