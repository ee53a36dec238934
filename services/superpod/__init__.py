"""A whole pod in one process; the only package that composes services under the simulation host."""
