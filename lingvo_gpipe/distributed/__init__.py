# SPDX-License-Identifier: Apache-2.0
"""Devices and processes: the cluster, workers and their supervision."""
