# SPDX-License-Identifier: Apache-2.0
"""What the programs that redo experiments of the GPipe paper in small are made of."""
