# SPDX-License-Identifier: Apache-2.0
"""Input generators: indexed data sets read by tf.data, restartable at any example."""
