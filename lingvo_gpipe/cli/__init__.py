# SPDX-License-Identifier: Apache-2.0
"""Flags, one-line errors and start-up of the programs."""
