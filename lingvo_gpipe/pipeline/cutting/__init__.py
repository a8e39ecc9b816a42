# SPDX-License-Identifier: Apache-2.0
"""The cut of a model into stages, from counted costs or measured times of its layers."""
