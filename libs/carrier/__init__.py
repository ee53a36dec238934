"""UB frames between dies whose processes share a host, through real shared memory."""
