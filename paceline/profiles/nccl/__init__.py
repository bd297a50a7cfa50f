"""Traffic between ranks, from NCCL's logs, NCCL's inspector or the native trainer's counters."""
