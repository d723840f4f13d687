"""The request API over NATS: what others may ask of a coordinator, and how they are answered."""
