# SPDX-License-Identifier: Apache-2.0
"""What the operations of a TensorFlow graph compute, keep in memory and change."""
