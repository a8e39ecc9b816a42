# SPDX-License-Identifier: Apache-2.0
"""Tasks with their own inputs and layers, one package for each field."""
