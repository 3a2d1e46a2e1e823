"""Values of flags that are neither words nor numbers. A converter's name is the type in the list of flags; it raises ValueError."""

import ast
from typing import Any


def tuple_type(text: str) -> tuple[int, ...]:
    """Numbers with commas between them, in parentheses or not: "(128,0)", "128,0"."""
    return tuple(int(part) for part in text.strip().removeprefix("(").removesuffix(")").split(",") if part.strip())


def moe_freq_type(text: str) -> int | list[int]:
    """A whole number, or an entry for each layer as a Python expression of lists: "[1,1,0]*4", "([1]*3+[0])*2"."""
    try:
        value = _list_or_int(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(text) from error
    if isinstance(value, list) and not value:
        raise ValueError(text)
    return value


def _list_or_int(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _list_or_int(node.operand)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List):
        members = [_list_or_int(entry) for entry in node.elts]
        numbers = [member for member in members if isinstance(member, int)]
        if len(numbers) == len(members):
            return numbers
    if isinstance(node, ast.BinOp):
        left, right = _list_or_int(node.left), _list_or_int(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            pair: Any = (left, right) if isinstance(left, list) else (right, left)
            entries, times = pair
            if 0 <= times * len(entries) <= 100_000:
                return entries * times
    raise ValueError(ast.unparse(node))


tuple_type.example = "(128,0)"  # type: ignore[attr-defined]
moe_freq_type.example = "[1,1,1,0]*8"  # type: ignore[attr-defined]
