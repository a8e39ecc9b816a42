# SPDX-License-Identifier: Apache-2.0
"""From gradients to updated weights: learners, optimizers, learning rates, averages."""
