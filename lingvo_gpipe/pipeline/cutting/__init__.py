# SPDX-License-Identifier: Apache-2.0
"""The costs and times of layers, and the cut of a model into stages."""
