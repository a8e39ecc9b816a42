# SPDX-License-Identifier: Apache-2.0
"""Chooses replicas, stages and schedule for a model on given devices. Used only by tools."""
