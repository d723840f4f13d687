"""Rows for people and for boot, in PostgreSQL."""
