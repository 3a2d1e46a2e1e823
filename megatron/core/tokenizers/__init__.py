"""Text to token ids and back, behind one interface. Torch-free; each backend is imported when it is first used."""

from megatron.core.tokenizers.base import MegatronTokenizer
from megatron.core.tokenizers.build import TOKENIZER_TYPES, build_tokenizer, vocab_size_with_padding

__all__ = ["TOKENIZER_TYPES", "MegatronTokenizer", "build_tokenizer", "vocab_size_with_padding"]
