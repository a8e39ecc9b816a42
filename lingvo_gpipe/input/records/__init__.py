# SPDX-License-Identifier: Apache-2.0
"""TFRecord files: indexed, streamed."""
