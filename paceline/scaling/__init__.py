"""How a cluster scales and which node costs it speed: campaigns, their analysis, checks of hosts."""
