"""What joins the devices of some hosts: every collective, and every pair of hosts."""
