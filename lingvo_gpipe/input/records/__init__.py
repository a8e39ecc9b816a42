# SPDX-License-Identifier: Apache-2.0
"""TFRecord files, by index or as a stream."""
