"""A batch ramp-up planned before it runs: layout, nodes and time of each stage, and schedules judged."""
