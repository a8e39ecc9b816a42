# SPDX-License-Identifier: Apache-2.0
"""The build of the package."""
