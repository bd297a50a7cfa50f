"""How a cluster scales, and which node costs how much: pure functions over measured groups."""
