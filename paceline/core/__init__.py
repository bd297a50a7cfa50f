"""Values and arithmetic: pure functions over frozen values, no input or output."""
