"""Other programs that start Firecracker microVMs, driven from processes of their own with packages of their own.

Nothing is imported here: `drive_*` and `rounds` run with a Python that has none of our packages.
"""
