"""Real NATS and PostgreSQL servers of our own, when the operator names none."""
