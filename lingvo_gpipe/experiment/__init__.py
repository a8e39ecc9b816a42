# SPDX-License-Identifier: Apache-2.0
"""The parts of an experiment: registry, task, models."""
