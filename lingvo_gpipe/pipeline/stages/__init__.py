# SPDX-License-Identifier: Apache-2.0
"""One stage: its layers on a device and the functions traced for it."""
