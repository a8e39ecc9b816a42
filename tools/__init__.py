# SPDX-License-Identifier: Apache-2.0
"""Programs for users and developers: `python -m tools.<name> --help` from the checkout."""

# `python -m` imports this first: from here on Ctrl-C ends a program in one line.
from lingvo_gpipe.cli import interrupts as interrupts
