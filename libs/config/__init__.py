"""Typed settings: the topology file and the pod plan derived from it."""
