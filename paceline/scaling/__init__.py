"""Cluster scaling and slow nodes: scaling tests, their analysis, and checks of hosts."""
