# SPDX-License-Identifier: Apache-2.0
"""Trains by a Keras optimizer, without a task: a Keras model's `fit`, and steps for other loops."""
