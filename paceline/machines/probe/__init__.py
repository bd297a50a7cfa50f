"""What this machine is and can reach."""
