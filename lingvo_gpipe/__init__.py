# SPDX-License-Identifier: Apache-2.0
"""GPipe for TensorFlow 2 with Lingvo's face: params, layers, pipelines, training."""
