"""What ranks exchanged, from NCCL's logs, its inspector, or the native trainer's own counters."""
