# SPDX-License-Identifier: Apache-2.0
"""Small Keras models with random weights, for `tools.keras_models`."""
