"""Programs in addition to training: benchmarks, node checks, calibration, export."""
