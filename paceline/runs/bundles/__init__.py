"""Bundles: archives of one run that can be written, verified, imported and repeated."""
