#!/usr/bin/env bash
# Train on this host and keep at it: bash launch/local.sh [key=value ...]   (docs/launching.md)
#
# The words reach pretrain.py as they are. PYTHON chooses the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    python=python3 # inside a container or an activated environment
fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m launch.local "$@"
