# SPDX-License-Identifier: Apache-2.0
"""The schedule of a step as it ran, from a profile."""
