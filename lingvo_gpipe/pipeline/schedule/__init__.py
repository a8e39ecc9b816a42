# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: actions, their order on each device, and their text. No TensorFlow."""
