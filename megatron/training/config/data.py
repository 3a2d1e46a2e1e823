"""Data and tokenizer."""
# ruff: noqa: RUF009  (flag() makes a dataclass field)

from dataclasses import dataclass

from megatron.core.tokenizers.build import TOKENIZER_TYPES
from megatron.training.config.fields import SETTING, flag


@dataclass
class DataFlags:
    """Corpora, and how samples are cut from them."""

    data_path: list[str] | None = flag(
        None, "One prefix of .bin and .idx, or `weight prefix weight prefix ...`, or several prefixes (weighted by their size).", nargs="*"
    )
    train_data_path: list[str] | None = flag(None, "As --data-path, for training alone.", nargs="*")
    valid_data_path: list[str] | None = flag(None, "As --data-path, for validation alone.", nargs="*")
    test_data_path: list[str] | None = flag(None, "As --data-path, for the test alone.", nargs="*")
    data_args_path: str | None = flag(None, "A text file with what --data-path would be given.")
    per_split_data_args_path: str | None = flag(
        None, 'A JSON file {"train": [...], "valid": [...], "test": [...]} with what --train-data-path and the others would be given.'
    )
    split: str | None = flag(None, "Shares of training, validation and test documents of --data-path, such as 90,5,5. Default: 969,30,1.")
    mock_data: bool = flag(False, "Generated samples, no files.")
    data_cache_path: str | None = flag(
        None, "Folder for the index caches, local or shared by the nodes. Default: beside the data, and none for blends."
    )
    object_storage_cache_path: str | None = flag(
        None, "Local folder for copies of corpora in object storage, whose prefixes are URLs such as s3://bucket/corpus (needs fsspec)."
    )
    build_index_only: bool = flag(
        False,
        "Build every index that a training with these flags needs, and exit: on a machine without GPUs, alone, whatever the layout. "
        "--check-config-world-size says how many processes the training will have, where --global-batch-size does not fix its samples.",
        ours=True,
    )
    dataloader_type: str | None = flag(
        None,
        "`single` goes through the samples once in the dataset's order, `cyclic` shuffles them by epoch. Default: single.",
        choices=("single", "cyclic", "external"),
        built=("single", "cyclic"),
    )
    num_workers: int = flag(2, "Loader processes of each rank; 0 = in the training process.", minimum=0)
    reset_position_ids: bool = flag(False, "Positions start again after each end of document.")
    reset_attention_mask: bool = flag(False, "Tokens do not attend across an end of document.")
    eod_mask_loss: bool = flag(False, "No loss where the label follows an end of document.")
    sft: bool = flag(False, 'Train on the answers of conversations: --data-path names files of JSON lines, each {"messages": [...]}.')
    fim_data: bool = flag(False, "Fill in the middle: some documents become prefix, suffix and middle, with a mark before each.")
    fim_rate: float = flag(0.5, "Share of documents that are rearranged.", minimum=0.0, maximum=1.0)
    fim_spm_rate: float = flag(0.5, "Share of those with the suffix first.", minimum=0.0, maximum=1.0)
    fim_split_sample: str | None = flag(None, "Token at which documents are cut; each fragment is rearranged by itself.")
    fim_fragment_rate: float | None = flag(None, "Share of fragments that are rearranged. Default: --fim-rate.", minimum=0.0, maximum=1.0)
    fim_no_prefix: str | None = flag(None, "Fragments that begin with this text stay as they are.")
    fim_prefix_token: str = flag("<fim_prefix>", "Token before the prefix.")
    fim_middle_token: str = flag("<fim_middle>", "Token before the middle.")
    fim_suffix_token: str = flag("<fim_suffix>", "Token before the suffix.")
    fim_pad_token: str = flag("<fim_pad>", "Token that fills a document which came out shorter; it bears no loss.")
    fim_eod_token: str = flag("<|endoftext|>", "Token that ends documents. The default, where the tokenizer lacks it, means its own.")
    create_attention_mask_in_dataloader: bool = flag(
        True,
        "No attention mask from the loader.",
        names=("--no-create-attention-mask-in-dataloader",),
        no_effect="the loader makes a mask only where --reset-attention-mask cannot go by packed sequences",
    )
    mmap_bin_files: bool = flag(True, "Read .bin files instead of mapping them.", names=("--no-mmap-bin-files",))
    num_dataset_builder_threads: int = flag(
        1, "Threads that build the corpora's indices.", minimum=1, no_effect="each rank builds its indices in one thread"
    )
    mid_level_dataset_surplus: float = flag(
        0.005, "Samples asked of each corpus of a blend beyond its share, as a fraction.", minimum=0.0, maximum=1.0
    )
    separate_last_epoch_below: float = flag(
        0.8,
        "Several epochs of a corpus are shuffled together; a last one of which less than this part is needed is shuffled apart, after the "
        "others (its documents are new to no one, so that the loss may step down there).",
        minimum=0.0,
        maximum=1.0,
        ours=True,
    )


@dataclass
class TokenizerFlags:
    """The tokenizer and the vocabulary's size."""

    tokenizer_type: str | None = flag(
        None,
        "Kind of tokenizer.",
        choices=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
        built=tuple(TOKENIZER_TYPES),
        checkpoint=SETTING,
    )
    tokenizer_model: str | None = flag(None, "File or folder of the tokenizer (or a Hugging Face name).", checkpoint=SETTING)
    vocab_file: str | None = flag(None, "GPT-2's vocab.json, or BERT's vocab.txt.", checkpoint=SETTING)
    merge_file: str | None = flag(None, "GPT-2's merges.txt.", checkpoint=SETTING)
    vocab_size: int | None = flag(None, "Tokens before padding; needed by NullTokenizer, a check elsewhere.", minimum=1, checkpoint=SETTING)
    padded_vocab_size: int | None = flag(
        None,
        "Rows of the embedding, all of them in the softmax. Default: see --make-vocab-size-divisible-by.",
        minimum=1,
        checkpoint=SETTING,
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size; the softmax is over a multiple of this alone, so "
        "that the loss does not depend on the tensor-parallel size.",
        minimum=1,
        checkpoint=SETTING,
    )
    vocab_extra_ids: int = flag(0, "Sentinel tokens added at the end.", minimum=0, checkpoint=SETTING)
    special_tokens: list[str] | None = flag(
        None, "Special tokens to add.", names=("--tokenizer-special-tokens",), nargs="+", checkpoint=SETTING
    )
    tiktoken_pattern: str | None = flag(None, "How TikTokenizer splits text.", choices=("v1", "v2"), checkpoint=SETTING)
    tiktoken_num_special_tokens: int = flag(1000, "Ids that TikTokenizer sets aside.", minimum=0, checkpoint=SETTING)
    null_tokenizer_eod_id: int | None = flag(None, "NullTokenizer's end of document. Default: --vocab-size.", minimum=0, checkpoint=SETTING)
    null_tokenizer_pad_id: int = flag(-1, "NullTokenizer's padding; -1 = none.", minimum=-1, checkpoint=SETTING)
    tokenizer_hf_no_include_special_tokens: bool = flag(False, "No special tokens around a text.", checkpoint=SETTING)
    chat_template: str | None = flag(
        None,
        "File of a Jinja template that makes one text of a conversation, or the template. Default: the tokenizer's.",
        checkpoint=SETTING,
    )
    sft_tokenizer_prompt_format: str = flag(
        "nemotron-h-aligned",
        "How SFTTokenizer writes conversations: nemotron-h-aligned, nemotron-nano-v2, identity, or default, the tokenizer's own template.",
        checkpoint=SETTING,
    )
    trust_remote_code: bool = flag(False, "Hugging Face tokenizers may run code that comes with them.")
