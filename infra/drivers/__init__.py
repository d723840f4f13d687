"""What moves machines: one driver per backend type; drivers do not know each other."""
