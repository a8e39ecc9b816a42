# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/benchmark.py: what is measured, by whom, and how it is shown."""
