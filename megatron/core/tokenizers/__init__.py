"""Text to token ids and back, behind one interface. Torch-free; each backend is imported when it is first used."""

from megatron.core.tokenizers.base import MegatronTokenizer
from megatron.core.tokenizers.build import TOKENIZER_TYPES, build_tokenizer, vocab_size_with_padding
from megatron.core.tokenizers.fingerprint import check_fingerprint, tokenizer_record

__all__ = ["TOKENIZER_TYPES", "MegatronTokenizer", "build_tokenizer", "check_fingerprint", "tokenizer_record", "vocab_size_with_padding"]
