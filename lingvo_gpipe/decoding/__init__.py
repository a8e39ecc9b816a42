# SPDX-License-Identifier: Apache-2.0
"""Beam search, sampling and translation scores, called by tasks."""
