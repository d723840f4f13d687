"""The network of a host: a bridge, a TAP per address, and what each address may reach."""
