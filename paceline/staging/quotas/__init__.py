"""What quotas leave of a file system, as the kernel or the file system's own program tells it."""
