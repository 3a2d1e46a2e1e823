"""Mixture of experts: routing, balance losses, dispatch of tokens to the ranks of their experts, the experts.

router.py asks routing.py which experts a token goes to and what the balance losses are; token_dispatcher.py and flex_dispatcher.py move
tokens (communicated) and permutation.py orders them (computed); experts.py computes; moe_layer.py puts them together.
"""
