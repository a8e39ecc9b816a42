# SPDX-License-Identifier: Apache-2.0
"""Inputs of text, tokens and translation pairs."""
