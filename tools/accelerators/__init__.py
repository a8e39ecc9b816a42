# SPDX-License-Identifier: Apache-2.0
"""The checks of `tools.accelerator_check`."""
