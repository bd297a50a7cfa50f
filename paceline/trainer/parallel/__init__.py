"""The device mesh, collectives, tensor parallelism and pipeline stages."""
