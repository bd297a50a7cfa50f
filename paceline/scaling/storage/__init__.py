"""What the disks of some hosts give to loaders and checkpoints, and what a training needs."""
