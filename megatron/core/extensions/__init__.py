"""Optional libraries behind our own names."""
