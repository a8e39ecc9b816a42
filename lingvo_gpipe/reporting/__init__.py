# SPDX-License-Identifier: Apache-2.0
"""Output of a run: progress, metrics, summaries and the final report."""
