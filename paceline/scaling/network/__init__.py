"""Measurement of the network between the devices of some hosts: collectives and pairs of hosts."""
