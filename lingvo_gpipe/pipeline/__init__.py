# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules, the partitioner, stage functions, the engine and its layer."""
