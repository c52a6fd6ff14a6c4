"""A conversation's record, and the texts that its chat template writes of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...schemas.rows import BadRow, Message, Record
from .chat_template import ChatTemplate, Rendered
from .validate import ASSISTANT


class Conversation:
    """A record's messages under a chat template, of which each text is rendered once."""

    def __init__(self, record: Record, chat: ChatTemplate) -> None:
        assert not isinstance(record.prompt, str)
        self.record = record
        self.chat = chat
        self._prompt: tuple[Message, ...] = record.prompt
        self._texts: dict[tuple[object, ...], Rendered] = {}

    @cached_property
    def completions(self) -> tuple[tuple[Message, ...], ...]:
        """The messages of each completion."""
        return tuple(each for each in self.record.completions if not isinstance(each, str))

    @cached_property
    def wholes(self) -> tuple[tuple[Message, ...], ...]:
        """The prompt with each completion, which may continue the prompt's last message."""
        return tuple(self._joined(completion) for completion in self.completions)

    def texts(self) -> tuple[str, tuple[str, ...]]:
        """The prompt and each branch's full text."""
        for messages in (self._prompt, *self.completions):
            self.chat.require_roles(messages)
        texts = tuple(map(self.text, self.wholes))
        if self._prompt[-1]["role"] != ASSISTANT:
            return self.text(self._prompt, add_generation_prompt=True), texts
        # The texts of all completions are to begin with that of the prompt.
        how = {"continue_final_message": True} if self._continues else {}
        prompt = self.text(self._prompt, **how)
        if self._continues and not all(text.startswith(prompt) for text in texts):
            raise BadRow(
                "template_error",
                "the chat template does not show the prompt's last message, an assistant's, in "
                "the same way when the completion continues it; end the prompt with a user's",
            )
        return prompt, texts

    def text(self, messages: Sequence[Message], **how: bool) -> str:
        """The text of messages, as the template writes them with the record's tools and options."""
        return self._rendered(messages, **how).text

    def marked_turns(self, messages: Sequence[Message]) -> Sequence[tuple[int, int]]:
        """Where the template itself marks what the assistant says; none if it does not."""
        return self._rendered(messages).spans

    def _rendered(self, messages: Sequence[Message], **how: bool) -> Rendered:
        key = (*map(id, messages), *how.items())  # the record and `wholes` hold the messages
        found = self._texts.get(key)
        if found is None:
            options, tools = self.record.template_options, self.record.tools
            found = self._texts[key] = self.chat.rendered(messages, tools, options, **how)
        return found

    def _joined(self, completion: tuple[Message, ...]) -> tuple[Message, ...]:
        *before, last = self._prompt
        if last["role"] == completion[0]["role"] == ASSISTANT:
            said = last["content"] + (completion[0].get("content") or "")
            return (*before, {**last, **completion[0], "content": said}, *completion[1:])
        return (*self._prompt, *completion)

    @cached_property
    def _continues(self) -> bool:
        """Whether completions continue the last message of the prompt, an assistant's."""
        if self._prompt[-1]["role"] != ASSISTANT:
            return False
        continuing = {completion[0]["role"] == ASSISTANT for completion in self.completions}
        if len(continuing) > 1:
            raise BadRow(
                "schema",
                "some completions continue the prompt's last message, and others answer it",
            )
        return continuing == {True}
