"""XCCL: communication between dies by reading and writing memory, as protocol state machines."""
