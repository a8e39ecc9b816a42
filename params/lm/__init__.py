# SPDX-License-Identifier: Apache-2.0
"""Language modelling experiments."""
