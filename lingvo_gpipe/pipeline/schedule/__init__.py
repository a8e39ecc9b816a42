# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: actions, orders, their text. Imports no TensorFlow."""
