# SPDX-License-Identifier: Apache-2.0
"""Text, tokens and translation pairs."""
