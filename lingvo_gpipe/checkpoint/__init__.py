# SPDX-License-Identifier: Apache-2.0
"""Everything a run must not lose: checkpoints, the lock of a log directory, assets, Params."""
