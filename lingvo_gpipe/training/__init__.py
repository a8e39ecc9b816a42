# SPDX-License-Identifier: Apache-2.0
"""One run of training in its log directory."""
