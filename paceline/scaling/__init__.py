"""How a cluster scales and which node costs it speed: campaigns, analysis, checks of hosts."""
