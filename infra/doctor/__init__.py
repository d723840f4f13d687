"""What `fleetlog doctor` looks at: each check says what it found and what to do, and none takes the others down."""
