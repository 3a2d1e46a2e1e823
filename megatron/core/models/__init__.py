"""Models, and the protocol through which they get their layers."""
