# SPDX-License-Identifier: Apache-2.0
"""The choice of replicas, stages and schedule for given devices. Used by tools only."""
