#!/usr/bin/env bash
# Makes .venv with the pinned versions, or does nothing when it is there and up to date.
# Usage: cluster/environment.sh [PYTHON]. The same set is installed on every machine of a cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/.made-from
wanted=$(cat pyproject.toml constraints.txt | sha256sum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0
echo "idn: making .venv (a minute or two, once)" >&2
"${1:-python3}" -m venv .venv
.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
printf '%s\n' "$wanted" > "$stamp"
