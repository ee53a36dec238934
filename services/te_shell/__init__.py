"""One per TE: dispatches requests, fans out health checks."""
