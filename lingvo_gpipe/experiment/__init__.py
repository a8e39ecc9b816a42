# SPDX-License-Identifier: Apache-2.0
"""Experiments and their parts: the registry, tasks, and models."""
