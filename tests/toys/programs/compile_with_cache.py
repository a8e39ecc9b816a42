# SPDX-License-Identifier: Apache-2.0
"""Prints a result of a function that XLA compiles, or reads from a cache: the first argument."""

import sys

import tensorflow as tf

from lingvo_gpipe.cli import compilation_cache

compilation_cache.Use(sys.argv[1])
print(float(tf.reduce_sum(tf.function(lambda x: tf.sin(x) @ x, jit_compile=True)(tf.ones([3, 3])))))
