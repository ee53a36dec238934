"""Job executors: choose the prefill TE and the decode TE of each request."""
