"""Staged assets on the disks of other nodes: copied there, and checked by their manifests.

node_program is sent to every node and does the work there; node_copy talks with one of it;
fan_out does so with all nodes, over SSH or as steps of a Slurm job.
"""
