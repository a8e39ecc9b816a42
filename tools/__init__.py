# SPDX-License-Identifier: Apache-2.0
"""Programs for users and developers: `python -m tools.<name> --help` from the checkout."""
