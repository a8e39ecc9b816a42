#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The interpreter of Bazel's Python targets. Bazel links this file into each target's tree; the link leads back to
# the checkout, and so to its virtual environment. LINGVO_GPIPE_PYTHON names another interpreter (with Bazel:
# `--test_env=LINGVO_GPIPE_PYTHON=/path/to/python`).
here=$(dirname "$(readlink -f "$0")")
checkout=${here%/tools/bazel/python}
python=${LINGVO_GPIPE_PYTHON:-$checkout/.venv/bin/python}
if [ ! -x "$python" ]; then
  echo "No Python at $python: run 'make setup' in the checkout, or set LINGVO_GPIPE_PYTHON." >&2
  exit 1
fi
# -P: the folder of the started file stays off sys.path; else lingvo_gpipe/ and tests/ would shadow other packages.
exec "$python" -P "$@"
