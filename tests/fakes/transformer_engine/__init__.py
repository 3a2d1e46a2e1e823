"""A stand-in for Transformer Engine in tests on a CPU: the arguments that its modules take, what they compute in plain torch, and how
they treat main_grad. Arguments that megatron.core never gives are left out, so that giving one fails."""
