"""The fleet file: read, checked as a whole, and turned into structs."""
