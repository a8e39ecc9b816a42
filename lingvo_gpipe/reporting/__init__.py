# SPDX-License-Identifier: Apache-2.0
"""Everything people and scripts read of a run: progress, metrics, summaries, reports."""
