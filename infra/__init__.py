"""How fleetlog touches the world: it implements the ports, wires them, and opens the front doors."""
