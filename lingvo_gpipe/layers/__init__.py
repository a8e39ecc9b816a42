# SPDX-License-Identifier: Apache-2.0
"""Layers, one file for each family."""
