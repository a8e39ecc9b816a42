# SPDX-License-Identifier: Apache-2.0
"""Registered experiments. A key is the path below this package and the class name."""
