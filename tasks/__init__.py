# SPDX-License-Identifier: Apache-2.0
"""Task classes and the inputs and layers that only they need, one package a field."""
