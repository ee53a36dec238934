"""The cluster's brain: who is there, in which life, and whether the pod is ready."""
