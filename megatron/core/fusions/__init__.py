"""Fast paths of pointwise operations, each beside its plain twin (`*_plain`), which the tests compare it with."""
