"""What this machine is and can reach.

inventory, host, gpus, container and cgroups say what it is; gemm, memory, passes, collective and
context measure rates and losses by programs of the trainer (program starts them), trace follows the
memory of ranks that nobody runs; health judges a node by its own account, telemetry samples power
and energy beside a run.
"""
