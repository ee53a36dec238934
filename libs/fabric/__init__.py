"""The interconnect as arithmetic: constants, links as sequential resources, cost of computation."""
