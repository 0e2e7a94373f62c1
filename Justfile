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

# One cell of the paper's Table 1: train (or resume), evaluate, draw, collect; e.g. just cell cifar10 idensenet-lc --precision bf16 --workers 8
cell dataset model *options: _env
    @idn train {{ dataset }} --model {{ model }} --size paper --name {{ dataset }}-paper-{{ model }} {{ options }}
    @{{ just_executable() }} results "${IDN_RUNS:-runs}/{{ dataset }}-paper-{{ model }}"

# Every cell of Table 1, one after the other; the same command again goes on where it stopped
table1 *options: _env
    @for dataset in circles checkerboard moons mnist cifar10; do for model in residual idensenet idensenet-lc; do \
        {{ just_executable() }} cell $dataset $model {{ options }} || exit 1; done; done

# Toy data with other settings than the paper's, in a tenth to a fifth of its iterations; e.g. just toy-better moons 5000
toy-better dataset steps *options: _env
    @for model in residual idensenet idensenet-lc; do name={{ dataset }}-better-$model; \
        idn train {{ dataset }} --model $model --size paper --steps {{ steps }} --lr 1e-2 --warmup 100 --decay cosine \
            --flow.activation clipswish --flow.actnorm --flow.coeff 0.98 --name $name {{ options }} \
        && {{ just_executable() }} results "${IDN_RUNS:-runs}/$name" || exit 1; done

# Three small models at an equal number of parameters on real images, two seeds each
compare-tiny dataset *options: _env
    @for seed in 0 1; do for model in residual idensenet idensenet-lc; do name={{ dataset }}-tiny-$model-seed$seed; \
        idn train {{ dataset }} --model $model --size tiny --steps 1500 --batch 64 --seed $seed --name $name \
            --validate-every 500 --picture-every 1500 --checkpoint-every 250 {{ options }} \
        && {{ just_executable() }} results "${IDN_RUNS:-runs}/$name" || exit 1; done; done

# Evaluate and draw finished runs, collect them under results/ and make the page again; e.g. just results runs/moons-*
results +runs: _env
    @for run in {{ runs }}; do idn eval $run && idn plot $run && idn sample $run && idn reconstruct $run \
        && idn interpolate $run && idn collect $run --out results || exit 1; done
    @idn report results

# Tests with several Ray nodes, lost ones among them, and with Slurm where it is installed (minutes)
test-cluster *args: _env
    @pytest -s -m 'cluster or slurm' tests/cluster {{ args }}

# Throughput of 2 workers against 1, measured and predicted
bench-scaling *options: _env
    @python -m tests.cluster.bench_scaling {{ options }}
