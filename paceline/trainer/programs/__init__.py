"""Programs beside the training: probes, the check of nodes, calibration."""
