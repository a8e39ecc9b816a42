# SPDX-License-Identifier: Apache-2.0
"""Parts of the programs that repeat experiments of the GPipe paper on a small scale."""
