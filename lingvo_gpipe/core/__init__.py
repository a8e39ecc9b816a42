# SPDX-License-Identifier: Apache-2.0
"""The language of experiments: Params, NestedMap, BaseLayer, weights and costs."""
