"""The checks: see CONTRIBUTING.md for what each folder is for."""
