"""Sequential comparison: pairs tested during measurement, with one error for all analyses."""
