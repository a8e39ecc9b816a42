# SPDX-License-Identifier: Apache-2.0
"""A task placed on devices: its batches and one step of training or evaluation."""
