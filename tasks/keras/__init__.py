# SPDX-License-Identifier: Apache-2.0
"""Keras models as tasks of the trainer."""
