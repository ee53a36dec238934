"""The OpenAI-compatible edge: admission, deadlines, streams, cancellation."""
