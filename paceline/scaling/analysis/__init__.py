"""Analysis of measured groups of nodes: efficiency by cause, slow nodes, next measurements."""
