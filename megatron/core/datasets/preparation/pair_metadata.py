"""`<prefix>.meta.json` beside a pair: which tokenizer made the ids, from what, how many there are, and the checksums of both files.

The JSON object holds

    format      1
    dtype       numpy's name of the ids' type
    counts      documents, sequences, tokens, and empty_documents (of no sequence)
    tokenizer   type (--tokenizer-type), fingerprint (sha256 over all that decides ids), vocab_size (before padding for a model)
    flags       the flags that decided the ids; after a merge those on which all parts agree
    source      fingerprint (of input files, flags and tokenizer) of a prepared pair, or the names of the `merged` ones
    bin, idx    bytes and sha256 of the files
"""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.core.datasets.preparation.safe_files import replace_file
from megatron.core.tokenizers.fingerprint import META_SUFFIX

FORMAT = 1


class MetadataError(ValueError):
    """A .meta.json that cannot be understood. The message names it."""


def get_meta_path(path_prefix: str) -> str:
    return path_prefix + META_SUFFIX


@dataclass
class PairMetadata:
    """What the .meta.json of a pair says; the fields are those of the file."""

    dtype: str
    counts: dict[str, int]
    tokenizer: dict[str, Any]
    flags: dict[str, Any]
    source: dict[str, Any]
    bin: dict[str, Any]
    idx: dict[str, Any]
    format: int = field(default=FORMAT)

    def write(self, path: str) -> None:
        """Raises WriteError."""
        replace_file(path, (json.dumps({"format": self.format, **asdict(self)}, indent=1) + "\n").encode())


def read_metadata(path_prefix: str) -> PairMetadata | None:
    """The metadata of the pair, None where it has none (Megatron-LM writes none). Raises MetadataError."""
    path = get_meta_path(path_prefix)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if content["format"] != FORMAT:
            raise MetadataError(f"{path}: format {content['format']}, only {FORMAT} is known")
        metadata = PairMetadata(**{name: content[name] for name in PairMetadata.__dataclass_fields__})
        for record in (metadata.bin, metadata.idx):
            int(record["bytes"]), str(record["sha256"])
        return metadata
    except MetadataError:
        raise
    except (ValueError, KeyError, TypeError, OSError) as error:
        advice = "remove that file to use the pair without it"
        raise MetadataError(f"{path}: not the metadata of a pair ({error!r}); {advice}") from None
