# SPDX-License-Identifier: Apache-2.0
"""Keras layers and models as layers of this library."""
