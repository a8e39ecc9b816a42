# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/plan.py: the experiment, the devices, the report, and measured steps."""
