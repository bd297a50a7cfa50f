"""Measurement of token dispatch and expert GEMMs over devices."""
