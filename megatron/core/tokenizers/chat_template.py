"""Chat templates: one text of a conversation, and where in it the assistant speaks. Torch-free; needs jinja2.

A template sees what Hugging Face's see: `messages`, `add_generation_prompt`, `bos_token` and its like, `raise_exception(text)`,
`strftime_now(format)`, and the block {% generation %} ... {% endgeneration %} around what the assistant says.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import Message, Span, TokenizerFileError

# around what the assistant says while a template is rendered; no text that people write holds them
BEGIN, END = "\0<generation>\0", "\0</generation>\0"
ROLES = ("system", "user", "assistant", "tool", "developer")

# --sft-tokenizer-prompt-format -> template. Each puts the end of the assistant's turn inside {% generation %}.
PROMPT_FORMATS = {
    # turns of Nemotron-H: a role behind its mark; the mark of the next turn ends an answer
    "nemotron-h-aligned": (
        "{% set turn = namespace(marked=false) %}"
        "{% if messages[0].role != 'system' %}{{ '<SPECIAL_10>System\\n\\n' }}{% endif %}"
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ '<SPECIAL_10>System\\n' + message.content + '\\n' }}"
        "{% else %}"
        "{% if not turn.marked %}{{ '<SPECIAL_11>' }}{% endif %}"
        "{% set turn.marked = message.role == 'assistant' %}"
        "{% if turn.marked %}{{ 'Assistant\\n' }}{% generation %}{{ message.content + '\\n<SPECIAL_11>' }}{% endgeneration %}"
        "{% else %}{{ 'User\\n' + message.content + '\\n' }}{% endif %}"
        "{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ ('' if turn.marked else '<SPECIAL_11>') + 'Assistant\\n' }}{% endif %}"
    ),
    # turns of Nemotron Nano v2: <SPECIAL_12> ends each turn
    "nemotron-nano-v2": (
        "{{ bos_token | default('') }}"
        "{% if messages[0].role != 'system' %}{{ '<SPECIAL_10>System\\n\\n' }}{% endif %}"
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ '<SPECIAL_10>System\\n' + message.content + '\\n' }}"
        "{% elif message.role == 'assistant' %}"
        "{{ '<SPECIAL_11>Assistant\\n' }}{% generation %}{{ message.content + '\\n<SPECIAL_12>' }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ '<SPECIAL_11>User\\n' + message.content + '\\n' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' }}{% endif %}"
    ),
    # the contents alone, one behind the other; an answer ends with the end of the text
    "identity": (
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}"
        "{% endfor %}"
    ),
}
OWN_FORMAT = "default"  # the template that comes with the tokenizer


def template_of_format(prompt_format: str, own: str | None) -> str | None:
    """The template of `--sft-tokenizer-prompt-format`; `own` is the tokenizer's. Raises ValueError for a name that there is not."""
    if prompt_format == OWN_FORMAT:
        return own
    if prompt_format not in PROMPT_FORMATS:
        rule = f"is not one of {', '.join([*PROMPT_FORMATS, OWN_FORMAT])} ({OWN_FORMAT}: the template that comes with the tokenizer)"
        raise ValueError(f"--sft-tokenizer-prompt-format {prompt_format} {rule}")
    return PROMPT_FORMATS[prompt_format]


def read_template(chat_template: str) -> str:
    """`--chat-template`: the file of that name, or the template itself."""
    if os.path.isfile(chat_template):
        with open(chat_template, encoding="utf-8") as file:
            return file.read()
    if "{" not in chat_template:
        raise TokenizerFileError(f"--chat-template {chat_template}: no such file, and no template (it holds no {{{{ or {{%)")
    return chat_template


def template_of_folder(folder: str) -> str | None:
    """The chat template that accompanies a tokenizer.json: chat_template.jinja, or what tokenizer_config.json says."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        return read_template(path)
    path = os.path.join(folder, "tokenizer_config.json")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        template = json.load(file).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


class ChatTemplate:
    """A compiled template. names: bos_token and the like -> text. Raises ValueError where the template is no Jinja."""

    def __init__(self, template: str, names: Mapping[str, str]) -> None:
        jinja2 = require("jinja2", "a chat template (--sft)")
        self._error = jinja2.exceptions.TemplateError
        self._names = dict(names)
        self._marks_answers = "endgeneration" in template
        environment = require("jinja2.sandbox", "a chat template").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), "jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": self._refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            self._template = environment.from_string(template)
        except self._error as error:
            raise ValueError(f"the chat template is no Jinja template: {error}") from None

    def _refuse(self, text: str) -> None:
        raise self._error(text)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises ValueError for one that the template refuses."""
        return self._render(messages, add_generation_prompt).replace(BEGIN, "").replace(END, "")

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        check_messages(messages)
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._names)
        except (self._error, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from None

    def render_with_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and [begin, end) of what the assistant says in it, in characters.

        By the template's {% generation %}; where it has none, by comparing what it makes of parts of the conversation. Raises ValueError
        where that does not tell.
        """
        if self._marks_answers:
            return _cut_marks(self._render(messages, False))
        return self._by_prefixes(messages) or self._by_places(messages)

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """An answer is what a turn adds to the text that asks for it. None where a turn is written otherwise once others follow."""
        text, answers = self.render(messages), []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self.render(messages[:turn], True) if turn else ""
            answered = self.render(messages[: turn + 1])
            if not (text.startswith(answered) and answered.startswith(asked)):
                return None
            answers.append((len(asked), len(answered)))
        return text, answers

    def _by_places(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Answers are found by what stands in their place: from behind the text that asks for one to what ends the turn."""
        rule = "writes a turn otherwise once others follow, so that answers cannot be told from prompts"
        error = ValueError(f"the chat template {rule}; give one (--chat-template) with {{% generation %}} around answers")
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        places = {turn: f"\0answer {turn}\0" for turn in turns}
        stand_ins = [{**message, "content": places.get(turn, message["content"])} for turn, message in enumerate(messages)]
        text, rest, answers = "", self.render(stand_ins), []
        for turn in turns:
            before, found, rest = rest.partition(places[turn])
            without, asked = (self.render(stand_ins[:turn], prompt) if turn else "" for prompt in (False, True))
            prompt = asked.removeprefix(without)
            _, _, ending = self.render(stand_ins[: turn + 1]).rpartition(places[turn])
            if not found or prompt not in before or not rest.startswith(ending):
                raise error
            text += before
            begin = len(text) - len(before) + before.rindex(prompt) + len(prompt)
            text += messages[turn]["content"]
            answers.append((begin, len(text) + len(ending)))
        text += rest
        if text != self.render(messages):
            raise error
        return text, answers


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError unless each message has a role and a content that are text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("a conversation is a list of messages, such as [{'role': 'user', 'content': 'Hi'}, ...], and not empty")
    for turn, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {turn} of the conversation must have a role and a content, both text: {str(message)[:80]}")
        if message["role"] not in ROLES:
            raise ValueError(f"message {turn} of the conversation: role {message['role']!r} is not one of {', '.join(ROLES)}")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair: each tokenizer would fail in its own way, or replace it
            raise ValueError(f"message {turn} of the conversation is not valid Unicode: {error}") from None
        if BEGIN in message["content"] or END in message["content"]:
            raise ValueError(f"message {turn} of the conversation holds a mark that stands for answers here: {BEGIN!r} or {END!r}")


def _cut_marks(marked: str) -> tuple[str, list[Span]]:
    parts: list[str] = []
    answers, length = [], 0
    for number, piece in enumerate(marked.replace(END, BEGIN).split(BEGIN)):
        if number % 2 and piece:
            answers.append((length, length + len(piece)))
        parts.append(piece)
        length += len(piece)
    return "".join(parts), answers


def _generation_extension() -> Any:
    """The jinja2 extension that reads {% generation %} blocks and writes their content between BEGIN and END."""
    nodes = require("jinja2.nodes", "a chat template")
    extension: Any = require("jinja2.ext", "a chat template").Extension

    class Generation(extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    return Generation
