# SPDX-License-Identifier: Apache-2.0
"""Beam search, sampling and scores of translations. Called by tasks."""
