"""Measurement of a machine's properties and achievable rates.

inventory, host, gpus and container describe the machine. gemm, rates and context measure
throughput, latency and memory with programs of the trainer, which program runs. trace determines
the memory of ranks without running them. health judges a node by its own data. telemetry samples
power and energy during a run.
"""
