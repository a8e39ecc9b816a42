"""Lets Debian's Bazel (package bazel-bootstrap, 4.2.3) build this workspace without network.

Bazel 4 loads three repositories that a Python workspace never uses, and downloads them to do so. Debian's Bazel
runs happily with small local stand-ins, which hold what Bazel's own files load from them and nothing more.
"""

_STAND_INS = ["remote_coverage_tools", "rules_cc", "rules_java"]

def offline_repositories():
    """Defines the stand-ins, on Bazel 4 only: newer releases keep their own repositories."""

    # Debian's is built without a version, which shows as an empty text.
    version = native.bazel_version
    if version and not version.startswith("4."):
        return
    for name in _STAND_INS:
        native.local_repository(name = name, path = "tools/bazel/" + name)
