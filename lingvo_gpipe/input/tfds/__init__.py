# SPDX-License-Identifier: Apache-2.0
"""Inputs from TensorFlow Datasets."""
