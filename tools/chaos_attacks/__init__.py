# SPDX-License-Identifier: Apache-2.0
"""The attacks of `tools.chaos`."""
