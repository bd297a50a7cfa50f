"""Questions as a stranger types them, and the answers that help."""
