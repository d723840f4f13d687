"""Processes of this host by proof: identity, ends, cgroups and output, for every driver that starts some."""
