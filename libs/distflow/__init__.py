"""What DistFlow stands on in the DP groups: XCCL's point-to-point messages, and memory for KV."""
