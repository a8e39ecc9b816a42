# SPDX-License-Identifier: Apache-2.0
"""The time and memory of a schedule and a cut, and the best cut. Imports no TensorFlow."""
