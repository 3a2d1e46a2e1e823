"""Blends that stand in files instead of on the command line: --data-args-path and --per-split-data-args-path."""

import json
from typing import Any

SPLITS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}  # key in the file -> dest


def read_list(path: str) -> list[str]:
    """The words of a text file, as --data-path takes them. Raises OSError, or ValueError for a file without one."""
    with open(path, encoding="utf-8") as file:
        words = file.read().split()
    if not words:
        raise ValueError("it is empty, it holds what --data-path takes: prefixes, or a weight before each prefix")
    return words


def read_lists(path: str) -> dict[str, list[str] | None]:
    """dest -> words, of a JSON file {"train": [...], "valid": [...], "test": [...]} with lists as --data-path takes them, or null.

    Raises OSError, or ValueError for anything else.
    """
    example = 'for example {"train": ["0.7", "books", "0.3", "code"], "valid": ["books_valid"], "test": null}'
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise ValueError(f"it is no JSON ({error}), {example}") from None
    if not isinstance(content, dict) or not content or not set(content) <= set(SPLITS):
        raise ValueError(f"it must be an object with the keys train, valid, test, {example}")
    found = {}
    for split, words in content.items():
        if words is not None and not (isinstance(words, list) and words and all(isinstance(word, str | int | float) for word in words)):
            raise ValueError(f"{split} must be a list of prefixes, or of weights and prefixes, or null, {example}")
        found[SPLITS[split]] = None if words is None else [str(word) for word in words]
    return found


def fill_from_files(args: Any) -> str | None:
    """Put what the two files hold where --data-path and the like would have put it. What is wrong with the file, or None."""
    try:
        if args.data_args_path is not None:
            found: dict[str, list[str] | None] = {"data_path": read_list(args.data_args_path)}
        elif args.per_split_data_args_path is not None:
            found = read_lists(args.per_split_data_args_path)
        else:
            return None
    except (OSError, ValueError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    for dest, words in found.items():
        if getattr(args, dest) is None and words is not None:
            setattr(args, dest, words)
            args.provenance[dest] = "derived"
    return None
