"""Hosts checked before they are run on."""
