# SPDX-License-Identifier: Apache-2.0
"""Connects to the workers that a file lists."""

import pathlib
import sys

from lingvo_gpipe.distributed import cluster, cluster_spec

cluster.Cluster.Connect(cluster_spec.FromText(pathlib.Path(sys.argv[1]).read_text(), ''))
