# `just` lists what can be done. Every recipe that needs the environment makes it first.

python := env("PYTHON", "python3")
bin := justfile_directory() / ".venv/bin"
export PATH := bin + ":" + env("PATH")

_default:
    @just --list

# Make .venv with the pinned versions
setup: _env

# The stamp is newer than what it was made from, or the environment is made anew.
_env:
    @cluster/environment.sh {{ python }}

# Run the tests (marked slow ones apart)
test *args: _env
    @pytest {{ args }}

# Run the tests that take minutes each
test-slow *args: _env
    @pytest -m slow {{ args }}

# Style and types
lint: _env
    @ruff check . && ruff format --check . && mypy
