# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/benchmark.py: configurations, workers, and the report."""
