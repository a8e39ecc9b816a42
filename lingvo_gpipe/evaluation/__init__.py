# SPDX-License-Identifier: Apache-2.0
"""A pass over a data set, and the loop of the evaluator."""
