# SPDX-License-Identifier: Apache-2.0
"""Makes the documentation site, `make docs`: pages from the code, and links into it."""
