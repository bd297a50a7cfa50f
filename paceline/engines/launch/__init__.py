"""What it takes to start a framework's own program: its Job, and the environment it runs in."""
