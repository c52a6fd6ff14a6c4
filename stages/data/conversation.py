"""A conversation's record, and the texts that its chat template writes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from ...schemas.rows import BadRow, Message, Record
from .chat_template import ChatTemplate, request_of
from .validate import ASSISTANT


class Conversation:
    """A record's messages under a chat template, of which each request is packed once."""

    def __init__(self, record: Record, chat: ChatTemplate) -> None:
        assert not isinstance(record.prompt, str)
        self.record = record
        self.chat = chat
        self._prompt: tuple[Message, ...] = record.prompt
        self._packed: dict[tuple[object, ...], bytes] = {}

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
        texts = tuple(self.chat.answer(request).text for request in self._whole_requests)
        prompt = self.chat.answer(self._prompt_request).text
        if self._continues and not all(text.startswith(prompt) for text in texts):
            raise BadRow(
                "template_error",
                "the chat template does not show the prompt's last message, an assistant's, in "
                "the same way when the completion continues it; end the prompt with a user's",
            )
        return prompt, texts

    def requests(self) -> Iterator[bytes]:
        """What is asked for the texts."""
        yield from self._whole_requests
        yield self._prompt_request

    @cached_property
    def _whole_requests(self) -> tuple[bytes, ...]:
        return tuple(map(self.request, self.wholes))

    @cached_property
    def _prompt_request(self) -> bytes:
        """What renders the prompt so that the texts of all completions are to begin with it."""
        if self._prompt[-1]["role"] != ASSISTANT:
            return self.request(self._prompt, add_generation_prompt=True)
        how = {"continue_final_message": True} if self._continues else {}
        return self.request(self._prompt, **how)

    def text(self, messages: Sequence[Message], **how: bool) -> str:
        """The text of messages, as the template writes them with the record's tools and options."""
        return self.chat.answer(self.request(messages, **how)).text

    def marked_turns(self, messages: Sequence[Message], text: str) -> Sequence[tuple[int, int]]:
        """Where the template itself marks what the assistant says in a text; none if it does not.

        What it marks in a text that is rendered otherwise is not used.
        """
        if not self.chat.marks_turns:
            return ()
        answer = self.chat.answer(self.request(messages, is_marked=True))
        return answer.spans if answer.text == text else ()

    def request(self, messages: Sequence[Message], **how: bool) -> bytes:
        """What renders messages with the record's tools and options."""
        key = (*map(id, messages), *how.items())  # the record and `wholes` hold the messages
        packed = self._packed.get(key)
        if packed is None:
            options, tools = self.record.template_options, self.record.tools
            packed = self._packed[key] = request_of(messages, tools, options, how)
        return packed

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
