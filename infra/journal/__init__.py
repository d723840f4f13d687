"""The log, on NATS JetStream and in memory."""
