"""Messages between processes: one protocol, carried by NATS or by memory."""
